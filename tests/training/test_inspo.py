"""INSPO: instructions drawn from a population that evolves with the policy."""

from __future__ import annotations

import json
import random
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from stages import rl
from stages.agent.chat import Chat
from stages.agent.instructions import FILE, PHRASES, QUESTION, followed, instructed, read_instruction, write_instruction
from stages.agent.policy import load_tokenizer
from stages.algorithms.instruction_editors import by_chance, by_rules
from stages.algorithms.population import Instruction, Stored, Turn, WorstEpisodes, attributed, halved, pick, shares
from stages.algorithms.resolve import resolve_section
from stages.algorithms.settings import Rl
from stages.evaluation.panels import Job
from stages.evaluation.plan import plan_jobs
from stages.records.episode import TurnRecord, read_rows
from stages.runtime.validation import ParamsError
from stages.training.common.documents import encode
from stages.training.sft.hints import demonstration_instructions
from training.instruction_sources import EVOLVING, RL, episodes_of, playing, source_of, turn
from training.toys import KilledError, demonstration, kill_at_step, letter_tasks, outputs, run


def population(*weights: float, uses: int = 16) -> list[Instruction]:
    return [Instruction(number, f"{number} {QUESTION}", weight, uses) for number, weight in enumerate(weights)]


def stored(*turns: Turn, instruction: int = 0, number: int = 0) -> Stored:
    return Stored(number, instruction, "t", "find it", turns, 0.0, False)


# ---- must hold ---------------------------------------------------------------------------------------------------------------


def test_shares_by_hand() -> None:
    """w = [0.5, 0.3]: tau 0.1 gives [0.8808, 0.1192], tau 1 [0.5498, 0.4502]; a constant changes nothing."""
    assert shares([0.5, 0.3], 0.1) == pytest.approx([0.8808, 0.1192], abs=1e-4)
    assert shares([0.5, 0.3], 1.0) == pytest.approx([0.5498, 0.4502], abs=1e-4)
    assert shares([7.5, 7.3], 0.1) == pytest.approx(shares([0.5, 0.3], 0.1))
    assert shares([0.1, 0.9, 0.3], 1e-9) == pytest.approx([0.0, 1.0, 0.0])
    assert shares([0.1, 0.9, 0.3], 1e9) == pytest.approx([1 / 3] * 3)
    assert shares([0.5, 0.3], 0.1, 0.2) == pytest.approx([0.8 * 0.8808 + 0.1, 0.8 * 0.1192 + 0.1], abs=1e-4)
    assert [pick([0.2, 0.3, 0.5], draw) for draw in (0.0, 0.19, 0.2, 0.5, 0.999999)] == [0, 0, 1, 2, 2]


def test_weights_by_hand() -> None:
    """w = 0.5, rate 0.1, mean 0.9: 0.54; an unused instruction keeps its weight."""
    first, second = attributed(population(0.5, 0.5, uses=0), {0: [1.0, 0.8]}, 0.1)
    assert (first.weight, first.uses) == (pytest.approx(0.54), 2)
    assert (second.weight, second.uses) == (0.5, 0)


def test_halving_by_hand() -> None:
    """w = [0.6, 0.1, 0.4, 0.2]: 0 and 2 stay; so does an instruction with few uses; one alone is never pruned."""
    assert [one.number for one in halved(population(0.6, 0.1, 0.4, 0.2), 0.5, 16)] == [0, 2]
    few = [*population(0.6, 0.1, 0.4, 0.2), Instruction(4, "x", 0.0, 15)]
    assert [one.number for one in halved(few, 0.5, 16)] == [0, 2, 4]
    assert len(halved([*population(0.1), Instruction(1, "x", 0.9, 3)], 0.5, 16)) == 2
    assert [one.number for one in halved(population(0.5, 0.5, 0.5), 0.5, 16)] == [0, 1]
    assert len(halved(population(*[0.1] * 25), 0.28, 16)) == 7, "0.28 * 25 is above 7 in floats"


def test_constant_reward_moves_the_weight_alone() -> None:
    """Adding c = 0.3 to every reward of one group moves its instruction's w by rate * c, and no group-normalised advantage."""
    import torch

    rewards = [0.0, 1.0, 0.5]
    one, other = (attributed(population(0.5), {0: [value + c for value in rewards]}, 0.1)[0].weight for c in (0.0, 0.3))
    assert other - one == pytest.approx(0.1 * 0.3)
    groups = torch.tensor([rewards, [value + 0.3 for value in rewards]])
    normalised = (groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)
    assert torch.allclose(normalised[0], normalised[1], atol=1e-6)


def test_buffer_keeps_the_worst_and_the_newest() -> None:
    """Capacity 3, rewards 1, 0, 0.5, 0: 0, 0, 0.5, the newer 0 first."""
    buffer = WorstEpisodes(3)
    for reward in (1.0, 0.0, 0.5, 0.0):
        buffer.add(0, "t", "p", [turn("go")], reward, reward == 1.0)
    assert [(one.reward, one.number) for one in buffer.episodes] == [(0.0, 3), (0.0, 1), (0.5, 2)]
    buffer.add(7, "t", "p", [], 0.2, False)
    assert [one.number for one in buffer.failures(7, 2)] == [4, 3]
    restored = WorstEpisodes(3)
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert (restored.episodes, restored.arrived) == (buffer.episodes, 5)


def test_one_instruction_is_grpo(make_context) -> None:
    """Contract: the reduction in the card, to the last bit of the policy; a fixed instruction changes it, and so does another KL
    coefficient than the method's 0.001."""
    files = []
    for name, section in (
        ("inspo", {"tasks": {"settings": {"population": 1, "seeds": [QUESTION]}}}),
        ("grpo", {"algorithm": "grpo", "loss": {"kl_coef": 0.001, "kl_estimator": "k3"}}),
        ("no kl", {"algorithm": "grpo"}),
        ("fixed", {"tasks": {"settings": {"population": 1, "seeds": [f"Look. {QUESTION}"]}}}),
    ):
        context = make_context("rl", name, rl={**RL, "steps": 2, **section})
        run(context)
        files.append((context.root / "data/models/rl/toy/model.safetensors").read_bytes())
        samples = read_rows(context.root / "data/rl/toy/samples.parquet")
        assert all(one["messages"][0]["content"].startswith("Look. take") == (name == "fixed") for one in samples)
    assert files[0] == files[1]
    assert len({files[0], *files[2:]}) == 3


def test_state_restores_to_equal_draws() -> None:
    source = source_of(**EVOLVING)
    drawn = source.draw(1)
    source.observe(0, episodes_of(source, {0: 1.0, 1: 0.0}))
    other = source_of(**EVOLVING)
    other.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert (other.population, other.buffer.episodes) == (source.population, source.buffer.episodes)
    assert [other.draw(step) for step in range(4)] == [source.draw(step) for step in range(4)]
    assert len({task.task_id for task in drawn}) == 4


# ---- the source --------------------------------------------------------------------------------------------------------------


def test_every_question_has_one_instruction_and_its_own_id() -> None:
    source = source_of(**EVOLVING)
    drawn = source.draw(3)
    assert {task.prompt for task in drawn} == {"take the key", "Be brief. take the key"}
    for task in drawn:
        base, number = source.drawn[task.task_id]
        assert (task.prompt != "take the key") == (number == 1) == (task.task_id != base)
    more = source.draw(3, 1, count=2, without=[task.task_id for task in drawn])
    assert not {source.drawn[task.task_id][0] for task in more} & {source.drawn[task.task_id][0] for task in drawn}
    assert len(source.drawn) == 6


def test_evolution_prunes_verifies_and_merges() -> None:
    """By hand: the poor seed goes, candidates that are no worse than the survivor join at the survivors' mean weight."""
    asked: list[Any] = []
    source = source_of(playing(asked, "Never"), **{**EVOLVING, "verify": {"questions": 2, "accept_top": 1}})
    for step in range(2):
        source.begin(step)
        source.draw(step)
        played = episodes_of(source, {0: 0.2, 1: 0.0}, size=6)
        for episode in played:
            repeated = TurnRecord("go", "seen", True, 0.0, 0.0, "", "go", 0, 0)
            episode.turns = [repeated] * 3
        source.observe(step, played)
    assert not asked
    assert all(one.uses >= 3 for one in source.population)
    survivor = source.best
    source.begin(2)
    first, second = source.population
    assert first == survivor
    assert (second.text, second.weight, second.uses) == (f"Never repeat an action. {QUESTION}", survivor.weight, 0)
    assert (second.origin, second.parent, second.born) == ("rules", survivor.number, 2)
    assert len(asked) == 2 * (1 + source.written - 2) == source.counts["verifying_episodes"]
    assert {request.task.task_id.split("+")[0] for request in asked}.isdisjoint({one.task_id for one in source.buffer.episodes})
    assert len({request.episode_id for request in asked}) == len(asked)
    report = source.report()["instructions"]
    assert report["counts"]["pruned"] == 1
    assert report["counts"]["accepted"] == 1


def test_worse_candidates_leave_the_population_smaller() -> None:
    asked: list[Any] = []
    source = source_of(playing(asked, "Look first"), **{**EVOLVING, "seeds": [f"Look first. {QUESTION}"]})
    source.propose = lambda step: [(f"Go. {QUESTION}", 0)]  # type: ignore[method-assign]
    source.evolve(2)
    assert [one.text for one in source.population] == [f"Look first. {QUESTION}"]
    assert source.counts["below_baseline"] == 1


# ---- editors -----------------------------------------------------------------------------------------------------------------


def test_rules_add_what_failures_do_not_follow() -> None:
    rng = random.Random(0)
    one_turn, repeating = stored(turn("go")), stored(turn("go"), turn("go"), turn("go"))
    assert by_rules(QUESTION, [repeating] * 2 + [stored(turn("a"), turn("b"), turn("c"))], rng) in (
        *(f"Never repeat an action. {QUESTION}", f"Be brief. {QUESTION}"),
    )
    assert by_rules(f"Be brief. {QUESTION}", [repeating], rng) == f"Never repeat an action. Be brief. {QUESTION}"
    invalid = stored(turn("a"), turn("b"), turn("c", accepted=False))
    assert by_rules(f"Be brief. Never repeat an action. {QUESTION}", [invalid], rng).startswith("Write valid actions. Be brief.")
    full = f"Look first. Take every step. {QUESTION}"
    assert by_rules(full, [one_turn], rng) == full, "nothing to add"
    assert by_rules(f"Be brief. {QUESTION}", [one_turn], rng) in (f"Look first. {QUESTION}", f"Take every step. {QUESTION}")


def test_chance_adds_or_removes_a_phrase() -> None:
    found = {by_chance(f"Be brief. {QUESTION}", [], random.Random(seed)) for seed in range(40)}
    assert QUESTION in found
    assert len(found) == len(PHRASES)


def test_server_writes_candidates_once(tmp_path: Path) -> None:
    """Contract: replies are stored with their requests; a second run with the same state asks nobody. `requests` are in flight
    together: the model answers when all three have arrived."""
    asked: list[Any] = []
    together = Barrier(3, timeout=20)

    class Model(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            together.wait()
            text = f"Think {body['seed'] + 1} times. {QUESTION}" if body["seed"] < 2 else "No placeholder"
            reply = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *values: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/v1"
        editor = {"kind": "server", "server": {"model": "m", "base_url": address, "requests": 3, "attempts": 1}}
        settings = {**EVOLVING, "candidates": 3, "editor": editor}
        written = []
        for _ in range(2):
            source = source_of(None, tmp_path, **settings)
            source.buffer.add(0, "t", "find it", [turn("go")], 0.0, False)
            written.append(source.propose(2))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (
        written[0] == written[1] == [(f"Think 1 times. {QUESTION}", 0), (f"Think 2 times. {QUESTION}", 1), ("No placeholder", 0)]
    )
    assert len(asked) == 3
    content = next(body["messages"][0]["content"] for body in asked if body["seed"] == 0)
    assert f"Instruction:\n{QUESTION}" in content
    assert "find it\n> go\nseen" in content
    assert len(list((tmp_path / "data/replies").rglob("*.json"))) == 3


# ---- the stages --------------------------------------------------------------------------------------------------------------


def test_method_evolves_and_resumes_to_the_same_bytes(make_context) -> None:
    section = {**RL, "tasks": {"settings": EVOLVING}}
    plain = make_context("rl", "plain", rl=section)
    history = run(plain)
    report = json.loads((plain.root / "reports/rl/toy.json").read_text())
    found = report["instructions"]
    assert found["counts"]["written"] == 4
    assert sum(one["uses"] for one in found["population"]) <= 4 * 4 * 3
    verifying = found["counts"].get("verifying_episodes", 0)
    assert report["environment_steps"] == 2 * (4 * 4 * 3 + verifying)
    assert all(0 <= row["instruction_entropy"] < 1.4 for row in history)
    best = json.loads((plain.root / "data/models/rl/toy" / FILE).read_text())
    assert best == {"domain": "toy", "instruction": found["population"][0]["text"]}
    for step in (1, 3):
        killed = make_context("rl", f"killed {step}", rl=section)
        kill_at_step(killed, step)
        with pytest.raises(KilledError):
            rl.run(killed)
        rl.run(make_context("rl", f"killed {step}", rl=section))
        assert outputs(killed.root) == outputs(plain.root)


def test_evaluate_plays_a_policy_with_its_instruction(tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: on its own domain's panel, and under another hash; other models are played as ever."""
    import shutil

    folder = tmp_path / "rl"
    shutil.copytree(tiny_policy, folder)
    write_instruction(folder, "toy", f"Look. {QUESTION}")
    assert (read_instruction(folder, "toy"), read_instruction(folder, "other")) == (f"Look. {QUESTION}", QUESTION)
    panel: Any = SimpleNamespace(hash="p", environment={}, tasks=tuple(letter_tasks(2)))
    evaluate = SimpleNamespace(attempts=1, chunk=10, transfer=[])
    context: Any = SimpleNamespace(params=SimpleNamespace(evaluate=evaluate), data=tmp_path)
    domains = {"sft": ["toy", "other"], "rl@toy": ["toy", "other"]}
    jobs = plan_jobs(context, {"toy": panel, "other": panel}, {"sft": tiny_policy, "rl@toy": folder}, domains)
    assert [(job.domain, job.instruction) for job in jobs["rl@toy"]] == [("toy", f"Look. {QUESTION}"), ("other", QUESTION)]
    assert {job.instruction for job in jobs["sft"]} == {QUESTION}
    assert jobs["sft"][0].policy_hash != jobs["rl@toy"][0].policy_hash
    assert Job.__dataclass_fields__["instruction"].default == QUESTION
    task = instructed(letter_tasks(1)[0], f"Look. {QUESTION}")
    assert (task.task_id, task.prompt) == ("toy-000", "Look. take the key")


def test_demonstrations_follow_their_instructions(tiny_policy: Path) -> None:
    episodes = [demonstration(task) for task in letter_tasks(60)]
    found = demonstration_instructions(episodes, 0.5, 3)
    allowed = followed(episodes[0].turns)
    assert allowed == ["Look first.", "Be brief.", "Never repeat an action.", "Write valid actions."]
    seen = {phrase for phrase in PHRASES if any(phrase in text for text in found)}
    assert seen == set(allowed)
    assert 15 < sum(bool(text) for text in found) < 45
    chat = Chat(load_tokenizer(tiny_policy))
    plain, shown = encode(chat, episodes[:1], 128), encode(chat, episodes[:1], 128, [], ["Be brief. "])
    assert (
        shown.token_ids[0].tolist()[: shown.lengths[0]]
        == chat.encode_demonstration(
            [{"role": "user", "content": f"Be brief. {episodes[0].messages[0]['content']}"}, *episodes[0].messages[1:]]
        ).token_ids[: shown.lengths[0]]
    )
    assert int(shown.mask.sum()) == int(plain.mask.sum())
    cut = encode(chat, episodes[:1], plain.lengths[0], [], ["Be brief. "])
    assert cut.token_ids.equal(plain.token_ids), "no room"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tasks": {"source": "static"}}, r"inspo draws instructions: set it to instructions, or algorithm to grpo"),
        ({"tasks": {"settings": {"seeds": ["Look."]}}}, r"'Look.' must have {question} once"),
        ({"tasks": {"settings": {"seeds": [QUESTION, QUESTION]}}}, r"lists an instruction twice"),
        ({"tasks": {"settings": {"population": 2}}}, r"population is 2, and there are 3 seeds: raise it"),
        ({"tasks": {"settings": {"max_words": 1}}}, r"max_words is 1, and a seed has more"),
        ({"tasks": {"settings": {"editor": {"kind": "server"}}}}, r"name a model for kind server"),
        ({"tasks": {"settings": {"editor": {"server": {"model": "m"}}}}}, r"kind is rules, and server\.model is 'm'"),
        ({"tasks": {"settings": {"editor": {"kind": "server", "server": {"model": "m", "cache": ""}}}}}, r"name a folder"),
        ({"tasks": {"settings": {"temperature": 0}}}, r"temperature"),
        (
            {"tasks": {"settings": {"evolve_every": 0, "editor": {"kind": "random"}}}},
            r"editor has no effect: it needs evolve_every",
        ),
        ({"tasks": {"settings": {"seeds": [QUESTION], "population": 1, "keep": 0.3}}}, r"keep has no effect"),
        ({"tasks": {"settings": {"seeds": [QUESTION], "population": 1, "explore": 0.1}}}, r"explore has no effect"),
        ({"external": {"per_group": 1}}, r"rl\.external\.per_group is about tasks that curate wrote"),
        ({"tasks": {"settings": {"editor": {"kind": "random", "failures": 2}}}}, r"failures has no effect: it needs kind rules"),
    ],
)
def test_invalid_settings_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve_section(Rl.model_validate({"algorithm": "inspo", **section}))
