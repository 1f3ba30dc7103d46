"""Roles of self-play on search and factbook: what each may do, and scripted conversations for the warm-up."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.agent.prompts import load_prompt
from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.self_play import Gate, Proposal, SelfPlaySettings, failed_rule
from stages.curation.__main__ import configured_domain, self_play_lines
from stages.curation.imports import Importer
from stages.curation.self_play import conversations
from stages.environments.registry import load_domain
from stages.environments.search.proposals import parsed, read
from stages.environments.self_play import MARKS_TERM, PROPOSED, PROPOSER_USAGE, SelfPlayEnvironment, proposed_question
from stages.params import load_params, parse_params
from stages.records.sections import deep_merge
from stages.records.task import Task
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[2]
PAGES = "Kelmar Hall: founder Dorvin; rival Selat. query: founder\nDorvin Order: mentor Pomtar; heir Kelmar."


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[Task]]:
    domain, folder = load_domain("search", {"results": 3}), tmp_path_factory.mktemp("worlds")
    return domain, folder, domain.build([record for record in domain.recipes(104, 3) if record["split"] == "train"], folder, 1)


def test_proposers_search_and_ask_but_never_answer(world: Any) -> None:
    domain, folder, tasks = world
    environment = SelfPlayEnvironment(domain.make(folder))
    task = replace(tasks[0], spec={**tasks[0].spec, "role": "proposer"})
    environment.reset(task)
    refused = environment.step(f"answer {task.spec['answer']}")
    assert (refused.accepted, refused.done, refused.reward, refused.observation.text) == (False, False, 0.0, PROPOSER_USAGE)
    assert not environment.step("question ").accepted
    found = environment.step(f"search {task.spec['answer']}")
    assert (found.accepted, found.cost) == (True, 1.0)
    saved = environment.snapshot()
    asked = environment.step("question  Who is\nit? ")
    assert (asked.terminated, asked.observation.text, asked.reward, dict(asked.terms)) == (True, PROPOSED, 0.0, {})
    with pytest.raises(RuntimeError, match="over"):
        environment.step("search x")
    environment.restore(saved)
    assert environment.step("question Who?").terminated
    assert proposed_question("question  Who is\nit? ") == "Who is it?"
    assert proposed_question("search it") == ""


def test_proposers_run_out_of_turns_without_terms_of_an_answer(world: Any) -> None:
    domain, folder, tasks = world
    environment = SelfPlayEnvironment(domain.make(folder))
    environment.reset(replace(tasks[0], spec={**tasks[0].spec, "role": "proposer"}))
    steps = [environment.step("search x") for _ in range(domain.settings.max_turns)]
    assert [step.truncated for step in steps] == [False] * (len(steps) - 1) + [True]
    assert dict(steps[-1].terms) == {}


@pytest.mark.parametrize(
    ("action", "reward", "accepted"), [("answer {}", 1.0, True), ("answer no", 0.0, True), ("search {}", 0.0, False)]
)
def test_readers_have_one_turn_and_no_tools(world: Any, action: str, reward: float, accepted: bool) -> None:
    domain, folder, tasks = world
    environment = SelfPlayEnvironment(domain.make(folder))
    environment.reset(replace(tasks[0], spec={**tasks[0].spec, "role": "reader"}))
    step = environment.step(action.format(tasks[0].spec["answer"]))
    assert (step.terminated, step.reward, step.accepted) == (True, reward, accepted)


def test_solvers_play_by_the_domains_rules(world: Any) -> None:
    """Contract: without a role, only the count of the word `answer` is added, to the last step's terms."""
    domain, folder, tasks = world
    environment, plain = SelfPlayEnvironment(domain.make(folder)), domain.make(folder)
    actions = ["search answer x", f"answer {tasks[0].spec['answer']}"]
    environment.reset(tasks[0]), plain.reset(tasks[0])
    for action in actions:
        assert environment.state_key() == plain.state_key()
        assert environment.admissible() == plain.admissible()
        ours, theirs = environment.step(action), plain.step(action)
        assert (ours.observation, ours.reward, ours.done) == (theirs.observation, theirs.reward, theirs.done)
    assert dict(ours.terms) == {**theirs.terms, MARKS_TERM: 2.0}


def test_questions_are_read_by_the_rules_of_the_grammar() -> None:
    """By hand: Kelmar's founder is Dorvin, whose mentor is Pomtar."""
    text = "Who is the mentor of the founder of Kelmar?"
    assert parsed(text) == ("Kelmar", ("founder", "mentor"))
    assert read(text, PAGES) == "Pomtar"
    assert read(text, f"{PAGES}\nKelmar Court: founder Selat.") is None, "two founders: another world's page among them"
    assert read("Who is the envoy of Kelmar?", PAGES) is None
    assert parsed("Who is the boss of Kelmar?") is None
    assert parsed("Where is Kelmar?") is None


@pytest.mark.parametrize(("name", "gate"), [("search", {"min_words": 6}), ("factbook", {})])
def test_scripted_conversations_are_accepted_as_demonstrations(name: str, gate: dict[str, int], tmp_path: Path) -> None:
    """Contract: `python -m stages.curation self_play` writes what curate.imports takes; every third is a reader's."""
    domain, settings = load_domain(name, {"results": 3}), SelfPlaySettings(gate=gate)
    records = [record for record in domain.recipes(60, 1) if record["split"] == "train"]
    tasks = domain.build(records, tmp_path / "worlds", 1)
    found = list(conversations(domain, tmp_path / "worlds", tasks, settings, 9, 0))
    assert found == list(conversations(domain, tmp_path / "worlds", tasks, settings, 9, 0))
    last = [record["messages"][-1]["content"] for record in found]
    assert [text.partition(" ")[0] for text in last].count("answer") == 3
    assert all(text.startswith(("question ", "answer ")) for text in last)
    (tmp_path / "data/raw").mkdir(parents=True)
    (tmp_path / "data/raw/roles.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    read_ = Importer(domain, tasks, tmp_path / "worlds", 2000).read(tmp_path, ["data/raw/roles.jsonl"])
    assert read_.counts["data/raw/roles.jsonl"]["demonstrations"] == 9, read_.rejections


def failed(messages: list[dict[str, str]], gate: Gate) -> str:
    """The rule that a stored proposal fails; its answer is in the prompt."""
    found = re.match(r"Write a question whose answer is (.*?)(?:, as found in .*?)?\. Facts to follow", messages[0]["content"])
    assert found is not None
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    shown = [message["content"] for message in messages[2:] if message["role"] == "user"]
    queries = [text.removeprefix("search ").lower() for text in said if text.startswith("search ")]
    return failed_rule(Proposal(found[1], proposed_question(said[-1]), queries, shown), gate)


@pytest.mark.parametrize(("profile", "name"), [("ssp", "search"), ("ssp_factbook", "factbook")])
def test_shipped_proposals_pass_the_gate_of_their_profile(profile: str, name: str) -> None:
    """Contract: a proposer is shown what its gate accepts, and the documented command writes the shipped file again."""
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    overlay = yaml.safe_load((ROOT / f"profiles/methods/{profile}.yaml").read_text())
    params = parse_params(deep_merge(values, overlay))
    settings = resolve(params.section("rl", name), params.model.max_length).rl.tasks.settings
    lines = (ROOT / f"data/raw/self_play/{name}.jsonl").read_text().splitlines()
    stored = [json.loads(line)["messages"] for line in lines]
    proposals = [messages for messages in stored if messages[-1]["content"].startswith("question ")]
    assert len(proposals) > len(stored) / 2
    assert {failed(messages, settings.gate) for messages in proposals} == {""}
    assert {failed(messages, Gate(min_words=1000)) for messages in proposals} == {"words"}
    written = list(islice(self_play_lines(configured_domain(name, params), params, len(lines), 0), 6))
    assert written == lines[:6]


def test_only_domains_that_play_themselves_have_scripted_proposals() -> None:
    shipped = load_params(ROOT / "params.yaml")
    with pytest.raises(ParamsError, match=r"grpo of search proposes no questions: set it to ssp \(profiles/methods/ssp\.yaml\)"):
        list(self_play_lines(load_domain("search"), shipped, 1, 0))
    few = {
        "domains": ["search"],
        "per_domain": {"search": {"curate": {"train": 4}}},
        "rl": {"algorithm": "ssp", "tasks_per_step": 2},
    }
    with pytest.raises(ParamsError, match=r"about 4 training tasks give \d records, not 50; lower --count, raise curate\.train"):
        list(self_play_lines(load_domain("search"), parse_params(few), 50, 0))


def test_shipped_templates_say_what_they_are_given() -> None:
    assert load_prompt("proposer.txt").fields == {"answer", "hops", "examples"}
    assert load_prompt("proposer_topic.txt").fields == {"answer", "hops", "examples", "topic"}
    assert load_prompt("dummy.txt").fill(answer="Kelmar") == "Write answer Kelmar."
    assert len(load_prompt("reader.txt").sha256) == 64
    with pytest.raises(ValueError, match=r"is no text file in data/raw/prompts \(there: dummy\.txt"):
        load_prompt("../reader.txt")
