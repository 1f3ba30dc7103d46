"""`rl.reward.kind: verifier`: answers are compared with references while rl trains; the run resumes to the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from stages import rl
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.reward import EpisodeRewards
from stages.algorithms.settings import Rl
from stages.judging.verification import Verdict, zscores
from stages.records.episode import Episode, read_episodes, read_rows, read_tasks, write_episodes
from stages.records.task import Task
from stages.runtime.validation import ParamsError
from stages.seeding import stream
from stages.training.common.batches import trajectory_batch
from stages.training.rl import verified_rewards
from stages.training.rl.scoring import ReferenceTexts
from stages.training.rl.verified_rewards import VerifiedRewards, kept_for_fitting
from training.toys import SHORT_RUN, KilledError, kill_at_step, make_episode, outputs, read_history

RL: dict[str, Any] = {
    "algorithm": "rlvr_cross_domain",
    **SHORT_RUN,
    "verifier": {"fit_steps": 20},
}


def test_by_its_name_it_fits_a_verifier_and_resumes_to_the_same_bytes(make_context) -> None:
    whole = make_context("rl", "whole", rl=RL)
    rl.run(whole)
    found = json.loads((whole.root / "reports/rl/toy.json").read_text())["verifier"]
    assert (found["kind"], found["fitted"]) == ("generative", True)
    assert found["held_out"]["pairs"] > 0
    for row in read_history(whole.root):
        assert 0 <= row["verifier_score"] <= 1
        assert row["shaped_reward"] == pytest.approx(0.0, abs=1e-5), "standardised over the step"
        assert 0 <= row["verifier_false_positive_rate"] <= 1
    cut = make_context("rl", "cut", rl=RL)
    kill_at_step(cut, 2)
    with pytest.raises(KilledError):
        rl.run(cut)
    cut = make_context("rl", "cut", rl=RL)
    rl.run(cut)
    assert outputs(cut.root) == outputs(whole.root)


def test_a_verifier_of_ones_own_is_not_fitted(make_context, tiny_policy) -> None:
    section = {**RL, "steps": 1, "verifier": {"path": str(tiny_policy), "score": "binary", "read": "answer"}}
    context = make_context("rl", rl=section)
    rl.run(context)
    found = json.loads((context.root / "reports/rl/toy.json").read_text())["verifier"]
    assert (found["fitted"], found["held_out"]) == (False, {})


def test_a_verifier_can_learn_from_what_the_policy_answered(make_context, monkeypatch) -> None:
    context = make_context("rl", rl={**RL, "steps": 1, "verifier": {"fit_steps": 2, "fit_on": "rollouts"}})
    task_ids = [episode.task_id for episode in read_episodes(context.data / "curated/toy/demonstrations.parquet")]
    played = [
        replace(make_episode(name, name, [1], float(number % 2)), task_id=name, terminated=True)
        for number, name in enumerate(task_ids)
    ]
    write_episodes(context.data / "rollouts/toy/episodes.parquet", played)
    known: list[Any] = []
    monkeypatch.setattr(verified_rewards, "fit", lambda verifier, pairs, *rest: known.extend(pairs))
    rl.run(context)
    assert {pair.right for pair in known if pair.answer == "a"} == {True, False}, "episodes' own answers, with their labels"
    assert json.loads((context.root / "reports/rl/toy.json").read_text())["verifier"]["held_out"]["pairs"] > 0


def test_tasks_of_the_fit_are_not_trained_on(make_context, monkeypatch) -> None:
    """Contract: a quarter of the tasks fit the verifier, the others are played and measure it; rules may leave the same out."""
    fitted: list[Any] = []
    monkeypatch.setattr(verified_rewards, "fit", lambda verifier, pairs, *rest: fitted.extend(pairs))
    context = make_context("rl", rl=RL)
    rl.run(context)
    names = {task.task_id for task in read_tasks(context.data / "curated/toy/tasks.parquet", "train")}
    kept = {pair.task_id for pair in fitted}
    assert kept == kept_for_fitting(names, 0.25, context.params.seed)
    assert len(kept) == round(len(names) / 4) > 0
    assert not kept & {row["task_id"] for row in read_rows(context.root / "data/rl/toy/samples.parquet")}
    report = json.loads((context.root / "reports/rl/toy.json").read_text())["verifier"]
    assert report["held_out"]["pairs"] == 2 * len(names - kept), "a right and a wrong answer for each one's only reference"
    rule = make_context("rl", "rule", rl={**RL, "verifier": {"kind": "contains", "fit_share": 0.25}})
    rl.run(rule)
    assert not kept & {row["task_id"] for row in read_rows(rule.root / "data/rl/toy/samples.parquet")}


@pytest.mark.parametrize(
    ("verifier", "share"), [({}, 0.25), ({"path": "x"}, 0.0), ({"kind": "jaccard"}, 0.0), ({"fit_share": 0.0}, 0.0)]
)
def test_rules_and_models_of_ones_own_need_no_tasks(verifier: dict[str, Any], share: float) -> None:
    assert resolve(Rl(algorithm="rlvr_cross_domain", verifier=verifier)).rl.verifier.fit_share == share


@pytest.mark.parametrize("kind", ["contains", "jaccard"])
def test_rules_train(make_context, kind: str) -> None:
    context = make_context("rl", rl={**RL, "steps": 1, "verifier": {"kind": kind}})
    rl.run(context)
    assert json.loads((context.root / "reports/rl/toy.json").read_text())["verifier"] == {"kind": kind, "warned_at": None}


@pytest.mark.parametrize("kind", ["contains", "jaccard", "generative"])
def test_every_kind_compares_with_the_same_reference(make_context, monkeypatch, kind: str) -> None:
    """Contract: of a task with several references, rules read the one that a generative verifier reads; arms that compare kinds
    are told the same."""
    texts, compared = ["in the barn", "in the well", "in the box"], list[str]()
    monkeypatch.setattr(ReferenceTexts, "find", lambda self, task: texts)

    def judged(self: VerifiedRewards, task: Task, reference: str, *rest: Any) -> Verdict:
        compared.append(reference)
        return Verdict(0.5, 0.5, True)

    def ruled(reference: str, *rest: Any) -> float:
        compared.append(reference)
        return 0.0

    if kind == "generative":
        monkeypatch.setattr(VerifiedRewards, "_verdict", judged)
    else:
        monkeypatch.setattr(verified_rewards, kind, ruled)
    verifier = {"kind": kind, "fit_share": 0.0, **({"fit_steps": 1} if kind == "generative" else {})}
    context = make_context("rl", rl={**RL, "steps": 1, "verifier": verifier})
    rl.run(context)
    played = [row["task_id"] for row in read_rows(context.root / "data/rl/toy/samples.parquet")]
    assert compared == [stream("verifier.reference", context.params.seed, name).choice(texts) for name in played]


def test_a_widening_gap_warns_and_ends_the_training(make_context, capsys) -> None:
    """A verifier that accepts whatever the environment does not: the policy learns its errors."""

    def accepts_failures(self: VerifiedRewards, episode: Episode) -> float:
        return 1.0 - float(episode.success) if self._step else float(episode.success)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerifiedRewards, "_score", accepts_failures)
        gaps = {"warn_gap": 0.1, "stop_gap": 0.1}
        context = make_context("rl", rl={**RL, "steps": 12, "verifier": {"kind": "contains", **gaps}})
        rl.run(context)
    said = capsys.readouterr().err
    assert "rl.verifier and the gold quality have moved apart" in said
    assert "the training ends at step 5: the scores of rl.verifier" in said
    assert json.loads((context.root / "reports/rl/toy.json").read_text())["verifier"]["warned_at"] == 5
    assert len(read_history(context.root)) == 5


def scored(rewards: list[float], log_ratio: float = 0.0, **section: Any) -> TrajectoryBatch:
    """A batch with its advantages, for episodes of one group of four with these rewards from the verifier."""
    method = resolve(Rl(**{"algorithm": "rlvr_cross_domain", "verifier": {"kind": "contains"}, **section}), 64)
    episodes = [make_episode(f"e{place}", "g", [1], 0.0) for place in range(len(rewards))]
    batch = trajectory_batch(episodes).with_extra(EpisodeRewards(torch.tensor(rewards)))
    reference = batch.logprobs_old - log_ratio * batch.mask
    return method.prepare(method.shape(batch).with_(logprobs_ref=reference))


def test_kl_is_subtracted_after_standardising() -> None:
    """The paper's worked example: z = 1, log-ratio 5, beta 0.01 -> 0.95."""
    batch = scored([1.0, 1.0, 0.0, 0.0], log_ratio=5.0)
    assert batch.advantages is not None
    assert batch.advantages[batch.mask].tolist() == pytest.approx([0.95, 0.95, -0.05, -0.05])


def test_exact_match_in_one_group_is_group_normalised_outcome_rl() -> None:
    """One prompt per batch, a verifier that is right or wrong: its z-scores are GRPO's advantages with the divisor n."""
    outcomes = [1.0, 0.0, 0.0, 1.0, 0.0]
    ours = scored(zscores(outcomes), reward={"kl_coef": 0.0})
    method = resolve(Rl(algorithm="grpo", advantage={"ddof": 0}, loss={"kl_coef": 0.0}), 64)
    episodes = [make_episode(f"e{place}", "g", [1], outcome) for place, outcome in enumerate(outcomes)]
    theirs = method.prepare(method.shape(trajectory_batch(episodes)))
    assert ours.advantages is not None
    assert theirs.advantages is not None
    assert ours.advantages[ours.mask].tolist() == pytest.approx(theirs.advantages[theirs.mask].tolist(), abs=1e-5)
    assert ours.advantages[ours.mask].tolist()[0] == pytest.approx(1.5**0.5)


def test_rloo_on_verified_rewards() -> None:
    batch = scored([1.0, 0.0, 0.0, 1.0], advantage={"mean": "leave_one_out"}, reward={"kl_coef": 0.0})
    assert batch.advantages is not None
    assert batch.advantages[batch.mask].tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"verifier": {"kind": "jaccard"}}, "needs reward.kind: verifier"),
        ({"algorithm": "rlvr_cross_domain", "advantage": {"std": "batch"}}, r"already centred and scaled .*\(std: batch\)"),
        ({"algorithm": "rlvr_cross_domain", "advantage": {"mean": "group", "std": "group"}}, r"\(std: group\) would"),
        ({"algorithm": "rlvr_cross_domain", "advantage": {"whiten": True}}, r"\(whiten: true\) would normalise again"),
        ({"algorithm": "ppo", "reward": {"kind": "verifier"}, "advantage": {"whiten": True}}, r"\(whiten: true\) would"),
        ({"algorithm": "rlvr_cross_domain", "verifier": {"kind": "jaccard", "score": "binary"}}, "verifier.kind: generative"),
        ({"algorithm": "rlvr_cross_domain", "verifier": {"path": "x", "fit_steps": 3}}, "fit_steps"),
        ({"algorithm": "rlvr_cross_domain", "verifier": {"most_words": 3}}, "verifier.kind: contains"),
        ({"algorithm": "remax", "reward": {"kind": "verifier"}}, "greedy"),
        ({"algorithm": "archer_offline", "reward": {"kind": "verifier"}}, "plays none"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ParamsError, match=says):
        resolve(Rl.model_validate(settings))
