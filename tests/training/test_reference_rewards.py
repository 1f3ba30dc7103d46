"""`rl.reward.kind: references`: groups are scored against references while rl trains; the run resumes to the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages import rl
from stages.algorithms.algorithm import resolve
from stages.algorithms.settings import Rl
from stages.environments.briefing import BriefingDomain
from stages.judging.references import StyleChecks, content_reward, style_reward
from stages.records.episode import Episode, read_rows, read_tasks
from stages.records.reward_chain import RewardChain, Style
from stages.records.task import Task
from stages.runtime.validation import ParamsError
from stages.training.rl.reference_rewards import Chains, corrupted, cut, own_reward, weighed
from stages.training.rl.scoring import ReferenceTexts
from training.toys import SHORT_RUN, KilledError, kill_at_step, outputs, read_history

RL: dict[str, Any] = {
    "algorithm": "rlvrr",
    **SHORT_RUN,
}


def test_rewards_come_from_the_demonstrations_by_default(make_context) -> None:
    """The toy domain has no references of its own: those are the experts' last actions, "take the key"."""
    context = make_context("rl", rl=RL)
    rl.run(context)
    report = json.loads((context.root / "reports/rl/toy.json").read_text())["references"]
    assert report["content"] == "lcs"
    assert 3 <= report["tasks"] <= 12
    for row in read_history(context.root):
        assert row["references_reward"] == pytest.approx((row["references_content"] + row["references_style"]) / 2)
        assert row["shaped_reward"] == pytest.approx(row["references_reward"], abs=1e-6)


def test_run_resumes_to_the_same_bytes(make_context) -> None:
    whole = make_context("rl", "whole", rl=RL)
    rl.run(whole)
    cut = make_context("rl", "cut", rl=RL)
    kill_at_step(cut, 2)
    with pytest.raises(KilledError):
        rl.run(cut)
    cut = make_context("rl", "cut", rl=RL)
    rl.run(cut)
    assert outputs(cut.root) == outputs(whole.root)


@pytest.mark.parametrize("content", ["recall", "bleu", "random", "none"])
def test_every_content_trains(make_context, content: str) -> None:
    context = make_context("rl", rl={**RL, "steps": 1, "references": {"content": content}})
    rl.run(context)
    (row,) = read_history(context.root)
    assert (row["references_content"] > 0) == (content == "random"), "the tiny policy writes none of the key words"
    assert read_rows(context.root / "data/rl/toy/samples.parquet")


def test_agreement_is_left_out_where_it_is_undefined(make_context) -> None:
    """Contract: a step without a group with differences in reward and gold quality has no agreement, rather than one of 0: the
    tiny policy writes none of the key words."""
    context = make_context("rl", rl={**RL, "steps": 1, "references": {"content": "recall", "style_weight": 0.0}})
    rl.run(context)
    (row,) = read_history(context.root)
    assert row["references_content"] == 0
    assert "references_agreement" not in row


def scored(make_context, domain: BriefingDomain, answer: str, **settings: Any) -> dict[str, float]:
    from stages.training.rl.reference_rewards import ReferenceRewards

    context = make_context("rl", rl=RL)
    (task,) = domain.build([next(domain.recipes(1, 0))], Path("unused"), 1)
    algorithm = resolve(Rl(algorithm="rlvrr", references=settings))
    rewards = ReferenceRewards(context, algorithm, domain, {task.task_id: task}, 0)
    episode = Episode("e", task.task_id, "briefing", "g", 0, "", "", 1.0, 1.0, 0, terminated=True)
    return rewards._scored(task, with_answer(episode, answer))


def with_answer(episode: Episode, answer: str) -> Episode:
    from stages.records.episode import TurnRecord

    episode.turns = [TurnRecord(answer, "", True, 0.0, 0.0, "", answer, 0, 0)]
    return episode


@pytest.fixture
def briefing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BriefingDomain:
    monkeypatch.chdir(tmp_path)
    return BriefingDomain()


def test_briefs_are_rewarded_for_facts_order_and_form(make_context, briefing: BriefingDomain) -> None:
    (task,) = briefing.build([next(briefing.recipes(1, 0))], Path("unused"), 1)
    best, other, _ = briefing.references(task)
    values = dict(task.spec["facts"])
    assert scored(make_context, briefing, best)["reward"] == pytest.approx(1.0)
    assert scored(make_context, briefing, other)["content"] == pytest.approx(1.0)
    assert scored(make_context, briefing, other)["style"] < 1
    backwards = best
    for noun in task.spec["wanted"]:
        backwards = backwards.replace(values[noun], "X", 1)
    assert scored(make_context, briefing, backwards)["content"] < 0.5


def test_stuffing_can_be_bounded(make_context, briefing: BriefingDomain) -> None:
    (task,) = briefing.build([next(briefing.recipes(1, 0))], Path("unused"), 1)
    values = dict(task.spec["facts"])
    stuffed = " ".join(f"{noun} {values[noun]}" for noun in task.spec["wanted"])
    assert scored(make_context, briefing, stuffed)["content"] == pytest.approx(1.0)
    assert scored(make_context, briefing, stuffed)["keyword_share"] == 1.0
    assert scored(make_context, briefing, stuffed, max_keyword_share=0.9)["content"] == 0.0
    assert scored(make_context, briefing, briefing.references(task)[0], max_keyword_share=0.9)["content"] == 1.0


def test_without_demands_on_style_the_content_has_their_weight() -> None:
    """0.8 of the content: 0.8 without demands, where both weights are 0.5; 1.6 with the reference code's sum; a pure format
    reward stays 0. With demands, half of each."""
    plain = RewardChain(("a",), ((("a",),),))
    styled = RewardChain(("a",), ((("a",),),), (Style("any", 1.0, lambda text: True),))
    assert weighed(0.8, 0.0, plain, 0.5, 0.5) == pytest.approx(0.8)
    assert weighed(0.8, 0.0, plain, 1.0, 1.0) == pytest.approx(1.6)
    assert weighed(0.8, 0.0, plain, 0.0, 1.0) == 0.0
    assert weighed(0.8, 1.0, styled, 0.5, 0.5) == pytest.approx(0.9)


def test_a_chain_without_styles_pays_up_to_1(make_context, briefing: BriefingDomain, monkeypatch) -> None:
    (task,) = briefing.build([next(briefing.recipes(1, 0))], Path("unused"), 1)
    chain = replace(briefing.reward_chain(task), styles=())
    monkeypatch.setattr(BriefingDomain, "reward_chain", lambda self, task: chain)
    assert scored(make_context, briefing, briefing.references(task)[0])["reward"] == pytest.approx(1.0)


def test_long_key_words_are_cut() -> None:
    """A value of seven words would have to be repeated whole; in parts of three, it counts in parts."""
    text = "area one two three four five six seven"
    chain = RewardChain((text,), (((text, "area"),),))
    assert cut(chain, 3).key_points == ((("area one two", "three four five", "six seven", "area"),),)
    assert cut(chain, 8) == chain


def chains(domain: BriefingDomain, **settings: Any) -> Chains:
    return Chains(domain, ReferenceTexts(None, domain), resolve(Rl(algorithm="rlvrr", references=settings)).rl.references)  # type: ignore[arg-type]


def test_tasks_whose_references_miss_their_own_demands_are_left_out(briefing: BriefingDomain, monkeypatch) -> None:
    """A key word that no reference has: content 2/3 of three points, style 1: a mean of 0.83. Without styles: 0.67."""
    tasks = briefing.build([next(briefing.recipes(1, 0))], Path("unused"), 1)
    text = briefing.references(tasks[0])[0]
    words = tuple(text.split()[:2])
    points = (((words[0],),), ((words[1],),), (("absent",),))
    styles = (Style("any", 1.0, lambda text: True),)
    for given, expected in ((styles, 5 / 6), ((), 2 / 3)):
        chain = RewardChain((text,), points, given)
        assert own_reward(chain, StyleChecks()) == pytest.approx(expected)
        monkeypatch.setattr(BriefingDomain, "reward_chain", lambda self, task, chain=chain: chain)
        if given:
            assert chains(briefing).well_made(tasks) == tasks
            with pytest.raises(ValueError, match=r"least_own_reward is 0.9, and on none of the 1 training tasks"):
                chains(briefing, least_own_reward=0.9).well_made(tasks)
        else:
            with pytest.raises(ValueError, match=r"least_own_reward is 0\.7"):
                chains(briefing).well_made(tasks)
            assert chains(briefing, least_own_reward=0.0).well_made(tasks) == tasks


def test_shipped_briefs_meet_their_own_demands(briefing: BriefingDomain) -> None:
    tasks = briefing.build(list(briefing.recipes(20, 0)), Path("unused"), 1)
    assert chains(briefing, least_own_reward=1.0).well_made(tasks) == tasks


def test_badly_made_tasks_are_not_played(make_context, monkeypatch) -> None:
    """The toy's chains follow from its demonstrations; a third of the tasks gets a key word that no answer has."""
    made = Chains.make

    def spoilt(self: Chains, task: Task) -> RewardChain:
        chain = made(self, task)
        return replace(chain, key_points=((("absent",),),), styles=()) if task.task_id in bad else chain

    bad: set[str] = set()
    context = make_context("rl", rl=RL)
    bad |= {task.task_id for task in read_tasks(context.data / "curated/toy/tasks.parquet", "train")[::3]}
    monkeypatch.setattr(Chains, "make", spoilt)
    rl.run(context)
    played = {row["task_id"] for row in read_rows(context.root / "data/rl/toy/samples.parquet")}
    assert played
    assert not played & bad


def test_corrupted_key_words_cannot_score(briefing: BriefingDomain) -> None:
    (task,) = briefing.build([next(briefing.recipes(1, 0))], Path("unused"), 1)
    chain, best = briefing.reward_chain(task), briefing.references(task)[0]
    assert content_reward(corrupted(chain, 1.0, 0), best) == 0.0
    assert corrupted(chain, 0.0, 0) == chain
    assert style_reward(corrupted(chain, 1.0, 0), best, StyleChecks()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"references": {"content": "bleu"}}, "needs reward.kind: references"),
        ({"algorithm": "rlvrr", "references": {"content_weight": 0.0, "style_weight": 0.0}}, "all rewards would be"),
        ({"algorithm": "rlvrr", "references": {"content": "none", "style_weight": 0.0}}, "all rewards would be 0"),
        ({"algorithm": "rlvrr", "references": {"content": "bleu", "matching": "reference"}}, "references.content: lcs or recall"),
        ({"algorithm": "remax", "reward": {"kind": "references"}}, "greedy"),
        ({"algorithm": "archer_offline", "reward": {"kind": "references"}}, "plays none"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ParamsError, match=says):
        resolve(Rl.model_validate(settings))


def test_a_chain_without_references_is_no_badly_made_one() -> None:
    """A pure format reward has demands alone: its tasks stay."""
    assert own_reward(RewardChain((), (), (Style("any", 1.0, lambda text: False),)), StyleChecks()) == 1.0
