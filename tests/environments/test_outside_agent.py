"""The outside_agent domain: programs with OpenAI's API as environments, their errors, and rl that trains through them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from environments.agents import FEW_SHOT, SHORTENED, SUB_AGENT, TOY, write_agent

from stages.agent.environment_pool import EnvironmentPool
from stages.curation.demonstrations import DemonstrationPlan, demonstrate
from stages.curation.settings import Curate
from stages.environments.outside_agent import OutsideAgentDomain, OutsideAgentEnvironment, OutsideAgentSettings
from stages.environments.outside_agent.endpoint import RequestError, chat_call
from stages.environments.protocol import Observation
from stages.environments.registry import load_domain, open_domain
from stages.records.task import Task
from stages.runtime.validation import ParamsError

TASK = Task("toy-000", "outside_agent", "train", 0, "", {"input": {"room": 3}}, 0.0)


@pytest.fixture
def make(tmp_path: Path):
    """make(*parts, max_turns, timeout_s): an environment whose agent is made of `parts`; closed at the end."""
    made = []

    def make(*parts: str, max_turns: int = 12, timeout_s: float = 60.0) -> OutsideAgentEnvironment:
        made.append(OutsideAgentEnvironment(write_agent(tmp_path, *parts), max_turns, timeout_s))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def test_requests_are_observations_and_answers_are_actions(make) -> None:
    environment = make(TOY)
    assert environment.reset(TASK).text == "take the key\nyou are in room 3"
    step = environment.step("open the door")
    assert (step.observation.text, step.reward, step.done) == ("you see a key", 0.0, False)
    last = environment.step("lift it")
    assert (last.observation.text, last.reward, last.terminated, last.terms) == ("", 1.0, True, {"letter": 1.0})
    with pytest.raises(RuntimeError, match="the episode is over"):
        environment.step("again")
    environment.reset(TASK)
    environment.step("open the door")
    assert environment.step("walk").reward == 0.0


def test_last_line_of_output_is_the_reward_without_a_report(make) -> None:
    environment = make('ask([{"role": "user", "content": "hello"}])\nprint("done")\nprint(json.dumps({"reward": 0.25}))')
    environment.reset(TASK)
    step = environment.step("hi")
    assert (step.reward, step.terminated) == (0.25, True)


def test_state_is_restored_by_repeating_the_answers(make) -> None:
    environment = make(TOY)
    environment.reset(TASK)
    start = environment.state_key()
    environment.step("open the door")
    state, key = environment.snapshot(), environment.state_key()
    assert key != start
    environment.step("lift it")
    environment.restore(state)
    assert environment.state_key() == key
    assert environment.step("lift it").reward == 1.0


@pytest.mark.parametrize(
    ("program", "term", "terminated"),
    [
        ('ask([{"role": "user", "content": "a"}])\nraise SystemExit(3)', "agent_failed", True),
        ('ask([{"role": "user", "content": "a"}])\nask([{"role": "user", "content": "b"}])', "other_conversation", False),
        ('ask([{"role": "user", "content": "a"}])\nimport time\ntime.sleep(600)', "agent_silent", False),
    ],
)
def test_an_agent_that_fails_costs_its_episode_alone(make, program: str, term: str, terminated: bool) -> None:
    """Contract: the episode has reward 0 and a term that says why; no process of the agent is left."""
    environment = make(program, timeout_s=60.0 if term != "agent_silent" else 1.0)
    environment.reset(TASK)
    process = psutil.Process(environment._process.pid)
    step = environment.step("x")
    assert (step.reward, step.terms, step.terminated, step.truncated) == (0.0, {term: 1.0}, terminated, not terminated)
    assert not process.is_running()


def test_other_conversations_are_named_and_go_on(make) -> None:
    """Contract: a request continues the conversation whose messages and answers it repeats; otherwise it begins another one, with
    what comes before its last message."""
    environment = make(SUB_AGENT)
    environment.conversations("several")
    assert environment.reset(TASK) == Observation("you are in room 3")
    steps = [environment.step(action) for action in ("look", "metal", "yes", "lift")]
    assert [(step.observation.text, step.conversation, step.observation.before) for step in steps] == [
        ("what is a key", 1, ()),
        ("are you sure", None, ()),
        ("you see a key", 0, ()),
        ("", None, ()),
    ]
    assert (steps[-1].reward, steps[-1].terminated, [step.reward for step in steps[:-1]]) == (1.0, True, [0.0] * 3)


def test_a_shortened_history_begins_another_conversation(make) -> None:
    environment = make(SHORTENED)
    environment.conversations("several")
    environment.reset(TASK)
    assert environment.step("open the door").conversation is None
    step = environment.step("lift it")
    room, lifted = {"role": "user", "content": "you are in room 3"}, {"role": "assistant", "content": "lift it"}
    assert (step.conversation, step.observation) == (1, Observation("you see a door", (room, lifted)))
    assert environment.step("go").terminated


def test_a_first_request_may_have_examples(make) -> None:
    environment = make(FEW_SHOT)
    environment.conversations("begun")
    example = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "a"})
    assert environment.reset(TASK) == Observation("you are in room 3", example)
    assert environment.step("go").reward == 1.0
    plan = DemonstrationPlan(Curate(expert_demonstrations=1, noisy_demonstrations=0), 0, 640)
    made = demonstrate(OutsideAgentDomain(), environment, TASK, plan)
    assert (made.episodes, made.rejected) == ([], {"expert:no_expert_action": 1})
    environment.conversations("plain")
    with pytest.raises(RuntimeError, match="first request has 3 messages; it must have one user message"):
        environment.reset(TASK)


def test_turn_limit_ends_the_agent(make) -> None:
    talk = 'messages = [{"role": "user", "content": "go"}]\nwhile True:\n    said = ask(messages)\n'
    talk += '    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go"}]'
    environment = make(talk, max_turns=2)
    environment.reset(TASK)
    assert not environment.step("one").done
    step = environment.step("two")
    assert (step.truncated, step.terminated, step.reward) == (True, False, 0.0)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(3)", r"toy-000: the agent .* ended with exit code 3 before its first request"),
        ('print("no task")', r"exit code 0 before its first request .* it printed: no task"),
        ("import time\ntime.sleep(600)", r"was silent for 1 s before its first request"),
        ('ask([{"role": "user", "content": "a"}], tools=[{"type": "function"}])', r"exit code 1"),
        (
            'ask([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}])',
            r"first request has 3 messages; it must have one user message",
        ),
    ],
)
def test_an_agent_that_never_asks_is_an_error(make, program: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        make(program, timeout_s=1.0 if "sleep" in program else 60.0).reset(TASK)


@pytest.mark.parametrize("report", ["", 'print("reward 1")', 'print(json.dumps({"reward": 2.0}))'])
def test_an_agent_must_report_a_reward(make, report: str) -> None:
    environment = make('ask([{"role": "user", "content": "a"}])\n' + report)
    environment.reset(TASK)
    with pytest.raises(RuntimeError, match=r"ended without a reward: post .* or print it as the last line"):
        environment.step("x")


def test_requests_that_can_not_be_answered_are_refused_by_name(make) -> None:
    environment = make(
        "import urllib.error\nfound = []\nfor more in ({'tools': [{}]}, {'n': 2}, {'stream': True}, {'messages': []}):\n"
        "    try:\n        post('/chat/completions', {'messages': [{'role': 'user', 'content': 'a'}], **more})\n"
        "    except urllib.error.HTTPError as error:\n        found.append(json.load(error)['error']['message'])\n"
        "ask([{'role': 'user', 'content': '|'.join(found)}])"
    )
    tools, several, stream, empty = environment.reset(TASK).text.split("|")
    assert tools.startswith("tools not supported here; leave it out")
    assert several == stream == "one answer at a time, whole: leave out n and stream"
    assert empty == "messages must be a non-empty list of messages"


def test_settings_and_records_are_checked() -> None:
    with pytest.raises(ParamsError, match=r"outside_agent\.environment\.command is '', which can't be started"):
        open_domain("outside_agent", {})
    with pytest.raises(ParamsError, match=r"outside_agent\.environment\.timeout_s"):
        load_domain("outside_agent", {"timeout_s": 0.0})
    domain = OutsideAgentDomain(OutsideAgentSettings(command="true"))
    with pytest.raises(ValueError, match="write data/raw/outside_agent"):
        list(domain.recipes(3, 0))
    with pytest.raises(ValueError, match=r"outside_agent record a: input: Field required"):
        domain.check({"task_id": "a", "split": "train"})
    task = domain.task({"task_id": "a", "split": "train", "input": {"room": 1}, "actions": ["open", "lift"]}, {})
    assert (task.prompt, task.spec, task.difficulty) == ("", {"input": {"room": 1}, "actions": ["open", "lift"]}, 2.0)
    assert domain.entities(task) == {'{"room": 1}'}


def test_expert_follows_the_records_actions(make) -> None:
    domain, environment = OutsideAgentDomain(), make(TOY)
    environment.reset(Task(**{**vars(TASK), "spec": {"input": {"room": 3}, "actions": ["open the door", "lift it"]}}))
    assert domain.expert(environment) == "open the door"
    environment.step("open the door")
    assert domain.expert(environment) == "lift it"
    environment.reset(TASK)
    assert domain.expert(environment) is None


def test_environments_of_other_processes(tmp_path: Path) -> None:
    """Contract: the domain's environments work in the processes that step them beside a GPU."""
    settings = OutsideAgentSettings(command=write_agent(tmp_path, TOY))
    with EnvironmentPool(_Maker(settings), 1) as pool:
        environment = pool.take()
        assert environment.reset(TASK).text == "take the key\nyou are in room 3"
        environment.conversations("several")
        environment.step("open")
        assert environment.step("lift").reward == 1.0


class _Maker:
    def __init__(self, settings: OutsideAgentSettings) -> None:
        self.settings = settings

    def __call__(self) -> OutsideAgentEnvironment:
        return OutsideAgentDomain(self.settings).make(Path())


def test_a_long_report_is_read_whole(make) -> None:
    terms = {f"quality_of_part_{number}": 0.5 for number in range(60)}
    report = f'print(json.dumps({{"reward": 0.25, "terms": {terms!r}}}))'
    environment = make('ask([{"role": "user", "content": "hello"}])\n', report)
    environment.reset(TASK)
    step = environment.step("hi")
    assert (step.reward, step.terms) == (0.25, terms)


def test_half_of_a_character_is_refused() -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        chat_call({"messages": [{"role": "user", "content": "cut \ud83d"}]})
