"""Search self-play: the source's rules on scripted episodes, and the method in stage rl."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import rl
from stages.agent.active_episode import EpisodeRequest
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import LossTerms
from stages.algorithms.settings import Rl
from stages.algorithms.sources.self_play import SelfPlay
from stages.algorithms.task_source import SourceInputs
from stages.curation.self_play import scripted_actions
from stages.engine.engine import Sampling
from stages.environments.registry import load_domain
from stages.records.episode import Episode, TurnRecord, read_rows, write_tasks
from stages.records.task import Task
from stages.runtime.resources import Resources
from stages.runtime.validation import ParamsError
from stages.training.common.loop import Learner, Update, make_processes
from stages.training.rl.role_updates import combined
from training.toys import FirstLetterEnvironment, KilledError, kill_at_step, letter_tasks, outputs, read_history, run

ROLES = ("proposer", "solver")
STEPS = {"tasks_per_step": 4, "group_size": 2}
GATE = {"min_words": 1, "min_queries": 1}


class Theatre:
    """Plays requests on the real search domain with scripted actions in place of a policy."""

    def __init__(self, folder: Path) -> None:
        self.domain = load_domain("search", {"results": 3})
        records = [record for record in self.domain.recipes(104, 3) if record["split"] == "train"]
        self.tasks = {task.task_id: task for task in self.domain.build(records, folder, 1)}
        self.folder, self.calls = folder, list[tuple[str, Sampling | None]]()
        self.script: Callable[[EpisodeRequest], Sequence[str]] = self.honest

    def honest(self, request: EpisodeRequest) -> Sequence[str]:
        """Proposers by the domain's script, readers and solvers that are right."""
        if request.role == "proposer":
            return scripted_actions(self.domain, request.task, self.domain.make(self.folder))
        return [f"answer {request.task.spec['answer']}"]

    def play(self, requests: Sequence[EpisodeRequest], sampling: Sampling | None) -> list[Episode]:
        environment, found = SelfPlay.make(self.domain, self.folder), []
        for request in requests:
            self.calls.append((request.role, sampling))
            environment.reset(request.task)
            name = f"{request.task.task_id}/{request.attempt:04d}"
            made = Episode(name, request.task.task_id, "search", request.group_id, 0, "", "", 1.0, 1.0, 0, role=request.role)
            made.messages = [{"role": "user", "content": request.task.prompt}]
            for action in self.script(request):
                step = environment.step(action)
                turn = TurnRecord(action, step.observation.text, step.accepted, step.reward, step.cost, "", action, 0, 0)
                made.turns.append(turn)
                made.reward += step.reward
                if step.done:
                    break
            found.append(made)
        return sorted(found, key=lambda one: one.episode_id)

    def source(self, **settings: Any) -> SelfPlay:
        values = {"algorithm": "ssp", **STEPS, "tasks": {"settings": {"gate": {**GATE, "reader": "rules"}, **settings}}}
        section = resolve(Rl.model_validate(values), 640).rl
        weights = dict.fromkeys(self.tasks, 1.0)
        return SelfPlay(SourceInputs(section, self.domain, self.tasks, self.folder, weights, {}, (3, "rl@search"), self.play))

    def step(self, source: SelfPlay, step: int, right: Callable[[Task, int], bool] = lambda task, number: True) -> list[Task]:
        """One step, in which the solver's episodes are right or wrong."""
        source.begin(step)
        drawn = source.draw(3, "rl@search", step)
        episodes = []
        for task in drawn:
            for number in range(2):
                reward = float(right(task, number))
                made = Episode(f"{task.task_id}/{number}", task.task_id, "search", task.task_id, 0, "", "", 1.0, 1.0, 0)
                made.turns, made.reward = [TurnRecord("answer x", "", True, reward, 0.0, "", "", 0, 0)], reward
                episodes.append(made)
        source.observe(step, episodes)
        return drawn


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Theatre:
    return Theatre(tmp_path_factory.mktemp("worlds"))


@pytest.fixture(autouse=True)
def honest(request: pytest.FixtureRequest) -> None:
    if "theatre" in request.fixturenames:
        made = request.getfixturevalue("theatre")
        made.script, made.calls = made.honest, []


def test_problems_are_the_questions_that_pass_and_pay_their_failures(theatre: Theatre) -> None:
    """Each problem has the answer that was proposed to, its question as the prompt; half solved pays 1 - 0.5."""
    source = theatre.source(gate={**GATE, "reader": "rules", "noisy_blobs": 0}, completion={"strategy": "dummy"})
    drawn = theatre.step(source, 0, lambda task, number: number == 0)
    valid = source.metrics()["valid"]
    assert 0 < valid <= 1
    problems = {task.task_id: task for task in drawn if task.task_id.startswith("ssp-")}
    assert len(problems) == round(valid * 4)
    assert len(drawn) == 4
    proposals = {episode.episode_id: episode for episode in source.role_episodes()["proposer"]}
    for name, problem in source.problems.items():
        assert proposals[name].turns[-1].action == f"question {problems[problem].prompt}"
        assert proposals[name].reward == proposals[name].turns[-1].reward == 0.5
        assert proposals[name].reward_terms == {"valid": 1.0, "solve_rate": 0.5}
        assert "role" not in problems[problem].spec
    failed = [episode for name, episode in proposals.items() if name not in source.problems]
    assert all((episode.reward, episode.reward_terms) == (0.0, {"valid": 0.0}) for episode in failed)
    assert source.metrics()["solve_rate"] == 0.5
    prompts = [episode.messages[0]["content"] for episode in proposals.values()]
    assert all("question <text>" in text and "Who is the" in text for text in prompts)


def test_answers_are_not_asked_with_their_own_question(theatre: Theatre) -> None:
    source = theatre.source()
    source.begin(0)
    for episode in source.proposed:
        asked = [task.prompt for task in theatre.tasks.values() if task.prompt in episode.messages[0]["content"]]
        assert len(asked) == 3
        assert not any(proposal == episode.turns[-1].action.removeprefix("question ") for proposal in asked)


def test_readers_of_the_policy_see_the_evidence_and_decide(theatre: Theatre) -> None:
    """The reader's own sampling; a wrong answer rejects, and no answer is `on_reader_error`."""
    replies = {"right": "answer {}", "wrong": "answer nobody", "none": "hm"}
    shares = {}
    for name, reply in replies.items():
        for on_error in ("reject", "accept"):

            def script(request: EpisodeRequest, reply: str = reply) -> Sequence[str]:
                if request.role != "reader":
                    return theatre.honest(request)
                assert "Read only this" in request.task.prompt
                return [reply.format(request.task.spec["answer"])]

            theatre.script, theatre.calls = script, []
            source = theatre.source(gate={**GATE, "reader": "policy", "on_reader_error": on_error})
            source.begin(0)
            shares[name, on_error] = source.metrics()["valid"] / source.metrics()["valid_by_rules"]
            sampled = {(role, given.temperature, given.max_tokens) for role, given in theatre.calls if given and role == "reader"}
            assert sampled == {("reader", 0.1, 70)}
    assert {key: value for key, value in shares.items() if value} == dict.fromkeys(
        [("right", "reject"), ("right", "accept"), ("none", "accept")], 1.0
    )


def test_the_rules_reader_rejects_questions_with_another_answer(theatre: Theatre) -> None:
    def script(request: EpisodeRequest) -> Sequence[str]:
        *searches, _ = theatre.honest(request)
        return [*searches, "question Who is the keeper of the heir of Nobody?"]

    theatre.script = script
    source = theatre.source()
    drawn = theatre.step(source, 0)
    metrics = source.metrics()
    assert (metrics["valid"], metrics["valid_by_rules"], metrics["gate/reader"], metrics["dummies"]) == (0.0, 1.0, 1.0, 1.0)
    assert all(task.prompt == f"Write answer {task.spec['answer']}." for task in drawn)
    assert metrics["pool"] == 0.0, "dummies are not pooled"
    assert "solve_rate" not in metrics


def test_failed_slots_are_filled_from_earlier_steps_or_with_copies(theatre: Theatre) -> None:
    source = theatre.source(completion={"max_success": 0.5})
    first = theatre.step(source, 0, lambda task, number: number == 0)
    known = {task.task_id for task in first if task.task_id.startswith("ssp-")}
    assert source.metrics()["pool"] == len(known) > 0
    theatre.script = lambda request: ["search x"] * 9
    again = theatre.step(source, 1)
    assert known <= {task.task_id for task in again}
    assert source.metrics()["reused"] == len(known) / 4
    assert {problem["rate"] for problem in source.pool.problems} == {1.0}, "the newest solve rate"

    theatre.script = theatre.honest
    copies = theatre.source(completion={"strategy": "resample"})
    theatre.step(copies, 0)
    own = [task for task in copies.tasks.values() if "copy" not in task.task_id]
    assert len(copies.tasks) == 4
    assert {task.prompt for task in copies.tasks.values()} == {task.prompt for task in own}
    assert {problem["task_id"] for problem in copies.pool.problems} == {task.task_id for task in own}


def test_the_pool_and_the_known_questions_are_the_state(theatre: Theatre) -> None:
    """Contract: a source restored from its state (as JSON) draws the same tasks."""
    source, restored = theatre.source(), theatre.source()
    theatre.step(source, 0)
    restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
    one, two = theatre.step(source, 1), theatre.step(restored, 1)
    assert [asdict(task) for task in one] == [asdict(task) for task in two]
    assert source.metrics() == restored.metrics()
    assert source.metrics()["new_questions"] > 0
    assert source.state_dict() == restored.state_dict()


def test_several_proposals_for_an_answer_are_a_group(theatre: Theatre) -> None:
    source = theatre.source(proposer={"n": 2})
    source.begin(0)
    groups = [episode.group_id for episode in source.proposed]
    assert len(groups) == 4
    assert sorted(groups.count(name) for name in set(groups)) == [2, 2]


def test_other_domains_are_refused(theatre: Theatre) -> None:
    inputs = theatre.source().inputs
    task = replace(next(iter(inputs.tasks.values())), spec={})
    with pytest.raises(ValueError, match="asks for questions to known answers, and task"):
        SelfPlay(replace(inputs, tasks={task.task_id: task}))
    with pytest.raises(ValueError, match=r"gate\.reader: rules needs a domain that reads"):
        SelfPlay(replace(inputs, domain=SimpleNamespace(settings=None)))


RL: dict[str, Any] = {
    **{"steps": 2, "tasks_per_step": 3, "group_size": 3, "learning_rate": 0.01, "warmup_steps": 0, "checkpoint_every": 1},
    "sampling": {"max_tokens": 3},
}


def stage(make_context: Any, monkeypatch: pytest.MonkeyPatch, name: str, **values: Any) -> Any:
    """A context of the toy domain whose tasks have answers."""
    made = SimpleNamespace(make=FirstLetterEnvironment.in_folder, settings=SimpleNamespace(max_turns=2))
    monkeypatch.setattr(rl, "open_domain", lambda *_: made)
    context = make_context("rl", name, rl={**RL, **values})
    tasks = [replace(one, spec={"answer": "key"}) for one in letter_tasks(16)]
    write_tasks(context.root / "data/curated/toy/tasks.parquet", tasks)
    return context


def test_without_proposals_it_is_grpo_on_the_curated_questions(make_context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: proposer.n 0 gives the batches, losses and weights of GRPO with the same clip range and KL term, bit for bit."""
    loss = {"aggregation": "token_mean", "clip_high": 0.285, "kl_coef": 0.01, "kl_estimator": "k3"}
    plain = stage(make_context, monkeypatch, "plain", algorithm="grpo", loss=loss)
    ours = stage(make_context, monkeypatch, "ours", algorithm="ssp", tasks={"settings": {"proposer": {"n": 0}}})
    assert run(plain) == run(ours)
    weights = [load_file(context.root / "data/models/rl/toy/model.safetensors") for context in (plain, ours)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_the_method_by_its_name_trains_both_roles_and_resumes(
    make_context: Any, monkeypatch: pytest.MonkeyPatch, tiny_policy: Path
) -> None:
    """Contract: `rl.algorithm: ssp` runs by its name; with a penalty the proposer's failures, too, train; a killed run ends with
    the same bytes; records say who spoke."""
    penalty = {"algorithm": "ssp", "tasks": {"settings": {"proposer": {"fail_reward": -0.1}}}}
    whole, killed = (stage(make_context, monkeypatch, name, **penalty) for name in ("whole", "killed"))
    run(whole)
    kill_at_step(killed, 2)
    with pytest.raises(KilledError):
        run(killed)
    run(stage(make_context, monkeypatch, "killed", **penalty))
    assert outputs(whole.root) == outputs(killed.root)
    rows = read_history(whole.root)
    assert [row["proposer/reward_mean"] for row in rows] == pytest.approx([-0.1, -0.1])
    assert [(row["valid"], row["gate/no_question"], row["dummies"]) for row in rows] == [(0.0, 1.0, 1.0)] * 2
    assert all(row["proposer/grad_norm"] > 0 for row in rows)
    roles = {sample["role"] for sample in read_rows(whole.root / "data/rl/toy/samples.parquet")}
    assert roles == {"proposer", "solver"}
    report = json.loads((whole.root / "reports/rl/toy.json").read_text())
    assert (report["algorithm"], report["ledger/environment_tokens_trained"]) == ("ssp", 0)
    assert sorted(report["self_play"]["prompts"]) == ["dummy.txt", "proposer.txt", "reader.txt"]

    frozen = {"algorithm": "ssp", "steps": 1, "tasks": {"settings": {"updates": {"solver": False}}}}
    alone = stage(make_context, monkeypatch, "alone", **frozen)
    run(alone)
    trained, start = (load_file(folder / "model.safetensors") for folder in (alone.root / "data/models/rl/toy", tiny_policy))
    assert all(trained[name].equal(start[name]) for name in start), "failures without a penalty have no gradient"
    both = run(stage(make_context, monkeypatch, "both", algorithm="ssp"))
    assert [row["proposer/grad_norm"] for row in both] == [0.0, 0.0], "nor of the KL term, once the policy has left the reference"
    assert both[1]["kl"] > 0


def test_both_roles_may_be_updated_at_once_and_resume(make_context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: with updates.combine an optimiser step has the sum of both losses: half as many steps, every token of both roles
    trained once, and the same bytes after a kill."""
    keys = {"algorithm": "ssp", "tasks": {"settings": {"proposer": {"fail_reward": -0.1}, "updates": {"combine": True}}}}
    updates: list[int] = []
    learnt = Learner.update

    def counted(learner: Learner, *given: Any) -> Any:
        updates.append(len(given[0]))
        return learnt(learner, *given)

    monkeypatch.setattr(Learner, "update", counted)
    whole, killed = (stage(make_context, monkeypatch, name, **keys) for name in ("whole", "killed"))
    rows = run(whole)
    assert len(updates) == 2, "one step per minibatch"
    kill_at_step(killed, 1)
    with pytest.raises(KilledError):
        run(killed)
    run(stage(make_context, monkeypatch, "killed", **keys))
    assert outputs(whole.root) == outputs(killed.root)
    assert all(row["grad_norm"] > 0 and "proposer/grad_norm" not in row for row in rows)
    report = json.loads((whole.root / "reports/rl/toy.json").read_text())
    samples = read_rows(whole.root / "data/rl/toy/samples.parquet")
    written = {role: sum(sum(owner == 1 for owner in one["owner"]) for one in samples if one["role"] == role) for role in ROLES}
    counted_tokens = report["ledger/policy_tokens_trained"] + report["ledger/policy_tokens_dropped"]
    assert counted_tokens == sum(written.values())
    assert report["ledger/policy_tokens_trained"] >= written["proposer"] > 0


def test_a_combined_update_is_the_sum_of_its_parts() -> None:
    """Contract: the gradient of the sum of two losses, each told its own trained tokens; the rest of a longer part is alone."""
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    told: list[tuple[str, list[int]]] = []

    def update(name: str, factor: float, skip: bool = False) -> Update:
        def loss(rows: list[int]) -> Any:
            value = factor * weight.sum() * len(rows)
            yield LossTerms(value, {"loss": value.detach()}, (torch.tensor(rows), torch.ones(len(rows), 1, dtype=torch.bool)))

        def tell(where: str, rows: torch.Tensor, mask: torch.Tensor) -> None:
            told.append((where, rows.tolist()))

        skips = (lambda sums: True) if skip else None
        trained, skipped = partial(tell, name), partial(tell, f"{name} skipped")
        return Update("policy", [[0, 1], [2]], loss, trained, skips=skips, on_tokens_skipped=skipped)

    first, second, rest = (update(name, factor) for name, factor in (("a", 1.0), ("b", 10.0), ("rest", 100.0)))
    both, alone = combined([iter([first, rest]), iter([second])])
    assert alone is rest
    module = torch.nn.ParameterList([weight])
    learner = Learner(module, torch.optim.SGD([weight], 1.0), lambda step: 1.0, 1e9, make_processes(Resources()))
    sums = learner.update(both.micro_batches, both.loss, both.on_tokens_trained, both.skips)
    assert weight.item() == 1.0 - 3 * 11.0
    assert sums["grad_norm"] == 33.0
    assert told == [("a", [0, 1]), ("a", [2]), ("b", [0, 1]), ("b", [2])]
    (skipping,) = combined([iter([update("a", 1.0, skip=True)]), iter([second])])
    assert skipping.skips is not None
    told.clear()
    parts = (skipping.on_tokens_trained, skipping.skips, skipping.on_tokens_skipped)
    assert learner.update(skipping.micro_batches, skipping.loss, *parts)["skipped"] == 1.0
    assert told == [("a skipped", [0, 1]), ("a skipped", [2]), ("b skipped", [0, 1]), ("b skipped", [2])]
    assert weight.item() == -32.0


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"combine": True, "solver": False}, "adds up the losses of proposer and solver"),
        ({"combine": True, "first": "solver"}, "first has no effect with combine: true"),
    ],
)
def test_updates_that_do_not_combine_are_refused(updates: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate({"algorithm": "ssp", "tasks": {"settings": {"updates": updates}}}))
