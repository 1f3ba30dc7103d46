"""Episodes of the code domain: outcomes, rewards, repair and players."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
from code_games import hand_task, make

from stages.environments.code import CodeDomain, CodeSettings
from stages.environments.code.environment import Judge, unfenced
from stages.environments.code.settings import Rewards
from stages.environments.protocol import Domain, Environment
from stages.sandbox import Outcome, Program, Sandbox, TestResult, Tests

CODERL = Rewards(fail=-0.3, error=-0.6, compile_error=-1.0)
PROGRAMS = [
    ("sum(b for b in a if b>3)", "pass", 1.0, "passed.", 1.0),
    ("def f(a):\n    return sum(b for b in a if b>3)", "pass", 1.0, "passed.", 1.0),
    ("Here:\n```python\nsum(b for b in a if b>3)\n```\nDone.", "pass", 1.0, "passed.", 1.0),
    ("sum(b for b in a if b>=3)", "fail", -0.3, "failed.", 0.5),
    ("sum(a)", "fail", -0.3, "f([4, 2]) is 6, not 4", 0.5),
    ("4", "fail", -0.3, "failed.", 0.0),
    ("sum(c)", "error", -0.6, "f([4, 2]): NameError: name 'c' is not defined", 0.0),
    ("a[9]", "error", -0.6, "f([4, 2]): IndexError: list index out of range", 0.0),
    ("while True: pass", "error", -0.6, "f([4, 2]): more than 20000 steps", 0.0),
    ("def g(a): return a", "error", -0.6, "NameError: f is not defined", 0.0),
    ("1 / 0 if a[2:] else sum(b for b in a if b>3) / (len(a) and 1)", "error", -0.6, "failed.", 0.5),
    ("sum(a", "compile_error", -1.0, "SyntaxError: '(' was never closed", 0.0),
    ("", "compile_error", -1.0, "SyntaxError: there is no program", 0.0),
    ("the sum of a", "compile_error", -1.0, "SyntaxError: invalid syntax", 0.0),
]


@pytest.mark.parametrize(("action", "outcome", "reward", "text", "share"), PROGRAMS)
def test_outcome_reward_and_message_of_each_program(
    sandbox: Sandbox, action: str, outcome: str, reward: float, text: str, share: float
) -> None:
    _, environment = make(CodeSettings(rewards=CODERL), sandbox)
    environment.reset(hand_task())
    step = environment.step(action)
    assert (step.observation.text, step.reward, step.terminated, step.truncated) == (text, reward, True, False)
    assert {name for name, value in step.terms.items() if value == 1.0 and name != "tests"} == {outcome}
    assert step.terms["tests"] == share
    assert step.accepted == (outcome != "compile_error")
    with pytest.raises(RuntimeError, match="episode is over"):
        environment.step("1")


def test_repair_shows_failing_test_and_scores_last_program(sandbox: Sandbox) -> None:
    _, environment = make(CodeSettings(max_turns=3, rewards=CODERL), sandbox)
    environment.reset(hand_task())
    first = environment.step("sum(a)")
    assert (first.observation.text, first.reward, first.done, first.terms) == ("f([4, 2]) is 6, not 4", 0.0, False, {})
    before = environment.snapshot()
    assert environment.state_key() == "hand#sum(a)"
    second = environment.step("sum(a")
    assert (second.accepted, second.done) == (False, False)
    assert environment.state_key() == "hand#sum(a)"
    last = environment.step("sum(b for b in a if b > 3)")
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    environment.restore(before)
    environment.step("sum(a)")
    given_up = environment.step("sum(c)")
    assert (given_up.reward, given_up.terminated, given_up.truncated) == (-0.6, False, True)
    environment.restore(before)
    hidden = environment.step("sum(b for b in a if b>=3)")
    assert (hidden.reward, hidden.terminated) == (-0.3, True), "a program that passes the shown tests is submitted"
    assert "3, 5" not in hidden.observation.text, "a hidden test is never shown"


def test_known_actions_are_solutions_and_near_misses_with_returns() -> None:
    """Contract: solutions in all styles and near misses, with the returns of the configured rewards, without running any. With
    turns for repair a mistake does not end the episode, and only solutions are known."""
    near = [{"mistake": "name", "source": "sum(c)", "outcome": "error"}]
    task = hand_task(near_misses=[*hand_task().spec["near_misses"], *near])
    known = dict(CodeDomain(CodeSettings(rewards=CODERL)).known_actions(task))
    assert known == {
        "sum(b for b in a if b>3)": 1.0,
        "sum(b for b in a if b>=3)": -0.3,
        "sum(b for b in a if b>3": -1.0,
        "sum(c)": -0.6,
    }
    assert dict(CodeDomain(CodeSettings(max_turns=3)).known_actions(task)) == {"sum(b for b in a if b>3)": 1.0}


def test_experts_succeed_novices_fail_and_learners_repair(sandbox: Sandbox) -> None:
    """Contract: learners err first and repair it where they can."""
    domain, environment = make(CodeSettings(max_turns=2), sandbox)
    assert set(domain.players()) == {"expert", "learner", "novice"}
    rewards: dict[str, list[float]] = defaultdict(list)
    for player in domain.players():
        for game in range(4):
            rng, total, done = Random(game), 0.0, False
            environment.reset(hand_task())
            while not done:
                step = environment.step(domain.player_action(player, environment, rng))
                total, done = total + step.reward, step.done
            rewards[player].append(total)
    assert rewards["expert"] == [1.0] * 4
    assert rewards["novice"] == [0.0] * 4
    assert 1.0 in rewards["learner"], "the missing bracket is reported and repaired"
    assert 0.0 in rewards["learner"], "the boundary mistake passes the shown tests"


def test_admissible_actions_are_known_programs_that_compile(sandbox: Sandbox) -> None:
    domain, environment = make(CodeSettings(), sandbox)
    environment.reset(hand_task())
    assert isinstance(environment, Environment)
    assert isinstance(domain, Domain)
    assert environment.admissible() == ["sum(b for b in a if b>3)", "sum(b for b in a if b>=3)"]
    assert domain.expert(environment) == "sum(b for b in a if b>3)"
    environment.step("1")
    assert environment.admissible() == []
    assert domain.expert(environment) is None


def test_judge_runs_a_program_once() -> None:
    """Contract: outcomes are cached, since search returns to the same programs."""

    class Counting:
        ran = 0

        def run(self, program: Program, tests: Tests) -> Outcome:
            self.ran += 1
            return Outcome("ok", results=tuple(TestResult("pass") for _ in tests.sources))

    counting = Counting()
    judge = Judge(counting)  # type: ignore[arg-type]
    for _ in range(3):
        assert judge.outcome(hand_task(), "1").passed
    judge.outcome(hand_task(), "2")
    assert counting.ran == 2


def test_returns_span_the_rewards() -> None:
    assert CodeDomain().returns() == (0.0, 1.0)
    assert CodeDomain(CodeSettings(rewards=CODERL)).returns() == (-1.0, 1.0)


def test_code_blocks_are_unwrapped() -> None:
    assert unfenced("a+1") == "a+1"
    assert unfenced("```py\none\n```\nno:\n```\ntwo\n```") == "two\n"
