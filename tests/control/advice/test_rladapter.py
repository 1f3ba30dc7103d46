"""RLAdapter: scores by hand, what it reduces to, the guidance that is learnt from, selection of pairs, replay of a record."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from stages.control.advice.adviser import ANALYSES, Adviser, Fields, LogisticAdapter, Pair, kept, scripted, scripted_goals
from stages.control.advice.language_model import LanguageModel
from stages.control.advice.ppo import advantages, losses
from stages.control.advice.rladapter import Guided, Training, run
from stages.control.advice.settings import Adapter, Advice, Decision, Score
from stages.control.advice.texts import UNKNOWN, achievement_score, encoded, follows, logistic
from stages.control.advice.world import ACTIONS, COLLECT, GOALS, OBSERVATION, TABLE, Grid, carried, seen
from stages.runtime.validation import ParamsError

SMALL: dict[str, Any] = {
    "environments": 4,
    "rollout": 128,
    "steps": 256,
    "stages": 2,
    "batch": 32,
    "epochs": 2,
    "episode_steps": 40,
    "query_interval": 10,
    "width": 16,
    "evaluate_episodes": 4,
}


def settings(**changes: Any) -> Advice:
    values = {**SMALL, **changes}
    if values.get("guidance") == "none":
        del values["query_interval"]
    return Advice.model_validate(values)


@pytest.mark.parametrize(("cosine", "score"), [(0.0, 0.26894), (0.1, 0.5), (0.3, 0.88080), (1.0, 0.999877), (-1.0, 1.67e-5)])
def test_score_by_hand(cosine: float, score: float) -> None:
    assert logistic(cosine, Score()) == pytest.approx(score, rel=1e-4 if score > 0.01 else 0.01)
    assert logistic(cosine, Score(kind="binary")) == float(cosine >= 0.1)


def test_score_increases_with_the_cosine_and_is_known_only_with_guidance() -> None:
    values = [logistic(cosine, Score()) for cosine in np.linspace(-1, 1, 41)]
    assert all(one < other for one, other in pairwise(values))
    assert follows([], "collect wood", 64, Score()) == follows(["collect"], "", 64, Score()) == UNKNOWN
    alike, other = (follows(["collect"] * 3, goal, 64, Score()) for goal in ("collect wood", "make iron pickaxe"))
    assert alike == pytest.approx(logistic(1 / math.sqrt(2), Score()), rel=1e-5)
    assert other < alike
    assert np.linalg.norm(encoded("collect wood", 64)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rates", "score"), [([100.0, 0.0], math.sqrt(101) - 1), ([50.0] * 8, 50.0), ([0.0] * 8, 0.0), ([10.0, 30.0], 17.466)]
)
def test_achievement_score_by_hand(rates: list[float], score: float) -> None:
    """It is below the arithmetic mean unless all are equal."""
    assert achievement_score(rates) == pytest.approx(score, abs=1e-3)
    assert achievement_score(rates) <= sum(rates) / len(rates) + 1e-9


def test_zero_guidance_weights_are_plain_ppo_bit_for_bit() -> None:
    """Actions, log-probabilities and losses of the first steps."""
    plain, guided = Training(settings(guidance="none")), Training(settings(guidance="fixed"))
    assert guided.player.guide is not None
    for parameter in guided.player.guide.parameters():
        torch.nn.init.zeros_(parameter)
    one, other = plain.rollout(), guided.rollout()
    for name in ("observation", "action", "logprob", "advantage", "target"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert torch.equal(losses(plain.player, one, plain.settings)[0], losses(guided.player, other, guided.settings)[0])
    assert not torch.equal(one.guidance, other.guidance)


def test_requests_are_due_at_multiples_of_the_interval() -> None:
    """82 in 8192 steps at 100."""
    asked = settings(environments=1, rollout=4096, steps=8192, stages=1, query_interval=100, guidance="llm_only")
    adviser = Adviser(asked.decision, None)
    guided = Guided(asked, adviser, asked.query_interval, (0,), 1)
    grid = Grid.new(1, 9, np.random.default_rng(0))
    for _ in range(8192):
        guided.before(grid)
    assert adviser.requests == 82


def test_guidance_is_kept_across_rollouts_and_dropped_at_an_episodes_end() -> None:
    for reset, left in ((True, 0), (False, 4)):
        training = Training(settings(guidance="llm_only", query_interval=30, reset_guidance=reset, episode_steps=48))
        training.rollout()  # 32 steps of 4 environments
        first = list(training.guided.texts)
        assert all(text in GOALS for text in first)
        data = training.rollout().guidance.reshape(32, 4, -1)
        expected = torch.from_numpy(np.stack([encoded(text, 64) for text in first]))
        assert torch.equal(data[0], expected)
        assert int((data[20].norm(dim=-1) > 0.5).sum()) == left
        assert bool((data[28:].norm(dim=-1) > 0.5).all())


@pytest.mark.parametrize("guidance", ["fixed", "rladapter"])
def test_learnt_guidance_is_that_of_the_action(guidance: str) -> None:
    """The first ratios are 1, also where an interval ends within the rollout."""
    training = Training(settings(guidance=guidance, query_interval=7))
    for _ in range(2):
        ratio = training.learn(training.rollout())
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-6, rtol=0)


def fields_of(guided: Guided, grid: Grid) -> Fields:
    guided.step = 0
    guided.before(grid)
    (last,) = guided.open
    assert last is not None
    return last[0]


def test_without_the_score_what_the_adapter_reads_does_not_depend_on_the_history() -> None:
    grid = Grid.new(1, 9, np.random.default_rng(0))
    for use_score, same in ((False, True), (True, False)):
        chosen = settings(guidance="rladapter", adapter={"use_score": use_score})
        read = []
        for history in (["collect"] * 5, [*["move west"] * 4, "collect"]):
            guided = Guided(chosen, Adviser(chosen.decision, LogisticAdapter(chosen.adapter, 15)), 10, (0,), 1)
            guided.texts, guided.histories[0] = ["collect wood"], type(guided.histories[0])(history)
            read.append(fields_of(guided, grid))
        assert (read[0] == read[1]) is same


def pair(gain: int, analysis: int = 0, score: float = 0.5) -> Pair:
    return Pair(Fields("tree here", "nothing", "", "", score, (0,)), analysis, gain)


def test_filtered_pairs_are_those_with_a_gain() -> None:
    pairs = [pair(gain, number) for number, gain in enumerate((0, 1, 0, 2))]
    assert [one.analysis for one in kept(pairs, "filtered")] == [1, 3]
    assert kept(pairs, "own_outputs") == pairs


def test_adapter_learns_the_kept_analyses_from_uniform() -> None:
    """Two states with an analysis each: their probabilities approach 1; own outputs drawn uniformly keep it near 1/8."""
    adapter = LogisticAdapter(Adapter(), 1)
    states = [Fields("", "", "", "", 0.5, (value,)) for value in (0, 1)]
    assert adapter.probabilities(states).flatten().tolist() == pytest.approx([1 / 8] * 16)
    before, after = adapter.fit([Pair(states[number % 2], number % 2, 1) for number in range(40)])
    assert before == pytest.approx(math.log(8))
    assert after < 0.5
    assert [int(one.argmax()) for one in adapter.probabilities(states)] == [0, 1]
    own = LogisticAdapter(Adapter(target="own_outputs"), 1)
    own.fit([Pair(states[number % 2], (number // 2) % 8, 0) for number in range(320)])
    assert float((own.probabilities(states) - 1 / 8).abs().max()) < 0.02


def test_the_adapter_reads_the_parts_of_its_prompt_that_it_is_to() -> None:
    """In the order of `reads`, then 1; texts as bags of words of length 1, here of two words each."""
    one = Fields("tree here", "1 wood", "move west", "collect wood", 0.25, (0, 1))
    seen_, moved, guided = (encoded(text, 16).tolist() for text in ("tree here", "move west", "collect wood"))
    for reads, expected in (
        (["state", "score"], [0.0, 1.0, 0.25]),
        (["score"], [0.25]),
        (["surroundings", "state"], [*seen_, 0.0, 1.0]),
        (["guidance", "score", "last_action"], [*guided, 0.25, *moved]),
    ):
        adapter = LogisticAdapter(Adapter.model_validate({"reads": reads}), 2, 16)
        assert adapter.features([one]).tolist() == [pytest.approx([*expected, 1.0])]
        assert adapter.weights.shape == (8, len(expected) + 1)
        assert adapter.probabilities([one]).tolist() == [pytest.approx([1 / 8] * 8)]


def test_an_adapter_that_reads_the_guidance_can_tell_it_apart() -> None:
    """Two analyses that follow from the guidance alone: the default, which does not read it, can't learn which."""
    states = [Fields("", "", "", text, 0.5, (0,)) for text in ("collect wood", "make iron pickaxe")]
    pairs = [Pair(states[number % 2], number % 2, 1) for number in range(40)]
    losses_ = []
    for reads in (["state", "score"], ["state", "score", "guidance"]):
        losses_.append(LogisticAdapter(Adapter.model_validate({"reads": reads}), 1).fit(pairs)[1])
    assert losses_[0] == pytest.approx(math.log(2), abs=0.05)
    assert losses_[1] < 0.3


def test_the_adapter_is_fitted_after_the_stages_that_are_due() -> None:
    for values, expected in (({}, [1, 2, 3, 4, 5]), ({"first_stage": 2, "every": 2}, [2, 4]), ({"first_stage": 5}, [5])):
        training = Training(settings(stages=5, steps=640, adapter=values))
        assert [stage for stage in range(1, 6) if training.due(stage)] == expected


def test_pairs_are_written_with_what_was_gained(tmp_path: Path) -> None:
    """All analyses whose window ended, those after the last fit too: of 4 environments, 3 of the 32 steps of the first stage,
    whose pairs are fitted, and 6 of both. The same file again for the same settings."""
    file = tmp_path / "pairs.jsonl"
    chosen = settings(guidance="rladapter", adapter={"pairs": str(file), "every": 2})
    run(chosen)
    written = file.read_bytes()
    rows = [json.loads(line) for line in written.splitlines()]
    training = Training(chosen)
    training.learn(training.rollout())
    training.adapt()
    assert "".join(training.written).encode() == b"".join(written.splitlines(keepends=True)[:12])
    assert len(rows) == 24
    assert {row["analysis"] for row in rows} <= set(ANALYSES)
    assert all(set(row) == {*Fields.__dataclass_fields__, "analysis", "gain"} for row in rows)
    assert [row["state"] for row in rows[:4]] == [[0] * 15] * 4
    run(chosen)
    assert file.read_bytes() == written


def test_several_sub_goals_in_one_sentence() -> None:
    """The first is the one that a single goal would be; the others differ; guidance names them in order."""
    one, three = Decision(), Decision(subgoals=3)
    for number in range(50):
        goals = scripted_goals(3, 3, three, number)
        assert goals[0] == scripted(3, 3, one, number)
        assert len(set(goals)) == 3
        assert scripted_goals(3, 3, one, number) == goals[:1]
    training = Training(settings(guidance="llm_only", decision={"subgoals": 3, "informed": 0.0, "uninformed": 0.0}))
    training.rollout()
    named = training.guided.texts[0].split(", then ")
    assert len(set(named)) == 3
    assert set(named) <= set(GOALS)
    assert training.adviser is not None
    assert training.adviser.right / training.adviser.requests == pytest.approx(3 / 8, abs=0.4)


def test_a_request_is_right_if_its_goals_include_the_one_to_pursue() -> None:
    adviser = Adviser(Decision(subgoals=8), None)
    assert [sorted(goals) for goals in adviser.advise([pair(0).fields] * 2, np.array([0, 7]), [(0,), (1,)])] == [
        list(range(8))
    ] * 2
    assert (adviser.requests, adviser.right) == (2, 2)


def test_scripted_decision_listens_to_right_analyses() -> None:
    rates = {}
    for said in (3, 2, None):
        draws = [scripted(said, 3, Decision(), number) for number in range(4000)]
        rates[said] = sum(goal == 3 for goal in draws) / len(draws)
    assert rates[3] == pytest.approx(0.9 + 0.1 / 8, abs=0.02)
    assert rates[2] == rates[None] == pytest.approx(0.2 + 0.8 / 8, abs=0.025)


def test_technology_tree_by_hand() -> None:
    """From wood to a wood pickaxe and stone; what is missing follows the inventory; a tool needs the table."""
    grid = Grid.new(1, 9, np.random.default_rng(0))

    def act(action: int) -> list[str]:
        return [GOALS[place] for place in grid.step(np.array([action]))[0].nonzero()[0]]

    def standing_on(kind: int) -> None:
        grid.position[0] = np.argwhere(grid.resource[0] == kind + 1)[0]

    assert GOALS[grid.missing()[0]] == "collect wood"
    standing_on(1)
    assert act(COLLECT) == []  # stone needs a pickaxe
    standing_on(0)
    assert act(COLLECT) == ["collect wood"]
    assert act(COLLECT) == []
    assert GOALS[grid.missing()[0]] == "place table"
    assert act(TABLE) == ["place table"]
    assert grid.things[0].tolist() == [1, 0, 0, 0]
    grid.position[0] = (grid.table[0] + 4) % 9
    assert act(6) == []  # too far from the table
    grid.position[0] = grid.table[0]
    assert act(6) == ["make wood pickaxe"]
    assert GOALS[grid.missing()[0]] == "collect stone"
    standing_on(1)
    assert act(COLLECT) == ["collect stone"]
    assert GOALS[grid.missing()[0]] == "collect wood"  # which a stone pickaxe takes, too
    assert carried(grid, 0) == "1 stone, wood pickaxe"
    assert "stone here" in seen(grid, 0)
    assert "table" in seen(grid, 0)
    assert grid.observation().shape == (1, OBSERVATION)
    assert grid.observation()[0, 17:].any()
    assert not grid.observation(own=False)[0, 17:].any(), "inventory, tools and achievements are hidden"
    assert (grid.observation(own=False)[0, :17] == grid.observation()[0, :17]).all()
    grid.reset(np.array([True]), np.random.default_rng(1))
    assert not grid.done.any()
    assert int((grid.resource > 0).sum()) == 16


def test_advantages_by_hand() -> None:
    """gamma 1/2, lambda 1/2: an episode's end counts the state after it and stops the sum."""
    reward, value, after = (torch.tensor(values)[:, None] for values in ([1.0, 2.0, 4.0], [0.0, 0.0, 1.0], [0.0, 2.0, 0.0]))
    found = advantages(reward, value, after, torch.tensor([[False], [True], [False]]), 0.5, 0.5)
    assert found.flatten().tolist() == pytest.approx([1.0 + 0.25 * 3.0, 3.0, 3.0])


def test_recorded_answers_repeat_a_run_without_the_model(tiny_policy: Path, tmp_path: Path) -> None:
    """Contract: the same figures and pairs, and no request reaches the model, which may be gone."""
    record = tmp_path / "advice.jsonl"
    folder = tmp_path / "model"
    folder.symlink_to(tiny_policy)
    chosen = settings(
        guidance="rladapter",
        steps=128,
        stages=1,
        episode_steps=20,
        test_interval=20,
        evaluate_episodes=2,
        decision={"kind": "model", "model": str(folder), "records": str(record)},
    )
    first = run(chosen)
    written = record.read_bytes()
    folder.unlink()
    training = Training(chosen)
    training.learn(training.rollout())
    assert training.chooser is not None
    assert training.chooser.calls == 0
    assert run(chosen) == first
    assert record.read_bytes() == written
    assert {one.analysis for one in training.guided.pairs} <= set(range(len(ANALYSES)))
    assert first["requests"] == 16.0


def test_a_record_is_of_the_model_s_content(tiny_policy: Path, tmp_path: Path) -> None:
    """Contract: a model that was changed in place is asked again, a copy elsewhere is not; without a folder the record must be of
    one model."""
    record, folder = tmp_path / "advice.jsonl", tmp_path / "model"
    shutil.copytree(tiny_policy, folder)

    def asked(model: Path) -> int:
        chooser = LanguageModel(Decision(kind="model", model=str(model), records=str(record)))
        chooser.choose(["Next goal:"], [(0,)])
        chooser.save()
        return chooser.calls

    assert [asked(folder), asked(folder), asked(tiny_policy), asked(tmp_path / "gone")] == [1, 0, 0, 0]
    (folder / "generation_config.json").write_text("{}")
    assert [asked(folder), asked(folder)] == [1, 0]
    with pytest.raises(ParamsError, match=r"decision\.records: .* has answers of 2 models; decision\.model must name"):
        asked(tmp_path / "gone")


def test_model_prefers_likely_goals_at_low_temperature(tiny_policy: Path) -> None:
    model = LanguageModel(Decision(kind="model", model=str(tiny_policy), temperature=1e-4))
    prompt = Fields("tree here", "nothing", "", "", 0.5, ()).decision_prompt(ANALYSES[0])
    found = model.choose([prompt] * 8, [(number,) for number in range(8)])
    (logprobs,) = model.answers.values()
    assert found == [[int(np.argmax(logprobs))]] * 8
    assert model.calls == 1
    several = LanguageModel(Decision(kind="model", model=str(tiny_policy), temperature=1e-4, subgoals=8))
    assert several.choose([prompt], [(0,)]) == [np.argsort(logprobs)[::-1].tolist()]


def test_a_run_depends_on_its_settings_alone() -> None:
    first = run(settings(guidance="rladapter"))
    assert run(settings(guidance="rladapter")) == first
    assert run(settings(guidance="rladapter", seed=1)) != first
    assert set(ACTIONS) > {"collect", "place table"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 1000}, "must be a multiple of rollout"),
        ({"environments": 5}, "must be a multiple of environments 5"),
        ({"guidance": "none", "test_interval": 5}, "test_interval has no effect: it needs guidance other than none"),
        ({"guidance": "llm_only", "adapter": {"target": "own_outputs"}}, "adapter has no effect: it needs guidance: rladapter"),
        ({"guidance": "fixed", "decision": {"kind": "model"}}, "decision has no effect"),
        ({"decision": {"kind": "model", "informed": 0.5}}, "decision.informed has no effect: it needs kind: scripted"),
        ({"decision": {"kind": "oracle"}}, "Input should be 'scripted' or 'model'"),
        ({"adapter": {"use_score": False}, "score": {"slope": 5.0}}, "score has no effect with adapter.use_score: false"),
        ({"adapter": {"use_score": False, "reads": ["state"]}}, "use_score: false has no effect where reads has no score"),
        ({"adapter": {"reads": ["state"]}, "score": {"slope": 5.0}}, "score has no effect where adapter.reads has no score"),
        ({"adapter": {"reads": []}}, "reads must name each part once, and at least one"),
        ({"adapter": {"reads": ["state", "weather"]}}, "Input should be 'state', 'score'"),
        ({"adapter": {"first_stage": 6}}, "adapter.first_stage 6 is after the last of 5 stages"),
        ({"decision": {"subgoals": 9}}, "less than or equal to 8"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Advice.model_validate(values)


def test_missing_models_and_broken_records_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"decision\.model: .*nowhere is no folder of a model"):
        LanguageModel(Decision(kind="model", model=str(tmp_path / "nowhere")))
    (tmp_path / "record").write_text('{"request": "a"}\n')
    with pytest.raises(ParamsError, match=r"decision\.records: line 1 of"):
        LanguageModel(Decision(kind="model", records=str(tmp_path / "record")))
