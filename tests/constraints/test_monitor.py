"""The monitor of behaviour formulas, against the language that they define, enumerated by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from stages.constraints.__main__ import main
from stages.constraints.conformance import first_violation
from stages.constraints.formula import Spec, SpecError, load_spec, parse_spec, shipped
from stages.constraints.monitor import Monitor, Position
from stages.constraints.transcript import Transcripts
from stages.records.episode import write_episodes

REACT = "(next q (until_5 (next t a ai o) ft) ans)"
PASS = "(next q (until_5 (next p (until_5 a s)) ft) ans)"


def spec(behaviour: str, *, env: str = "q o s") -> Spec:
    """A formula over states whose texts are their names in brackets."""
    words = behaviour.replace("(", " ").replace(")", " ").split()
    names = sorted({word for word in words if word.isalpha()} - {"next", "or", "until", "always"})
    states = " ".join(f"({name} env)" if name in env.split() else f'({name} "[{name}]")' for name in names)
    return parse_spec(f"(states {states}) (behaviour {behaviour})")


def after(monitor: Monitor, states: str) -> Position:
    position = monitor.start
    for state in states.split():
        position = monitor.step(position, state)
    return position


def accepts(monitor: Monitor, states: str) -> bool:
    try:
        return monitor.fulfilled(after(monitor, states))
    except ValueError:
        return False


def language(monitor: Monitor, position: Position, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if monitor.fulfilled(position):
        yield path
    for state in monitor.valid(position):
        yield from language(monitor, monitor.step(position, state), (*path, state))


def test_react_monitor():
    monitor = Monitor(spec(REACT))
    loop = " t a ai o"
    assert set(monitor.valid(monitor.start)) == {"q"}
    assert set(monitor.valid(after(monitor, "q"))) == {"ft", "t"}
    assert set(monitor.valid(after(monitor, "q t"))) == {"a"}
    assert set(monitor.valid(after(monitor, "q" + 5 * loop))) == {"ft"}
    with pytest.raises(ValueError, match="t may not come here; valid: ft"):
        monitor.step(after(monitor, "q" + 5 * loop), "t")


def test_react_has_exactly_six_transcripts():
    monitor = Monitor(spec(REACT))
    assert set(language(monitor, monitor.start)) == {("q", *("t", "a", "ai", "o") * loops, "ft", "ans") for loops in range(6)}
    with pytest.raises(ValueError, match="o may not come here; valid: a"):
        after(monitor, "q t o")


def test_bounds_of_loops():
    monitor = Monitor(spec("(until_2_4 (next t a) ft)"))
    assert [loops for loops in range(7) if accepts(monitor, "t a " * loops + "ft")] == [2, 3, 4]
    always = Monitor(spec("(always_1_2 (next t a))"))
    assert [loops for loops in range(5) if accepts(always, "t a " * loops)] == [1, 2]
    followed = Monitor(spec("(next (always_1_2 t) ft)"))
    assert [loops for loops in range(5) if accepts(followed, "t " * loops + "ft")] == [1, 2]
    with pytest.raises(SpecError, match="single state that ends it"):
        spec("(until_2 t (or a b))")


def test_pass_counters_reset_when_a_loop_is_entered_again():
    monitor = Monitor(spec(PASS))
    assert set(monitor.valid(after(monitor, "q p"))) == {"s", "a"}
    assert accepts(monitor, "q p s ft ans")
    assert accepts(monitor, "q p a a s ft ans")
    assert accepts(monitor, "q" + 2 * (" p" + 5 * " a" + " s") + " ft ans")
    assert not accepts(monitor, "q p" + 6 * " a" + " s ft ans")


def test_a_body_that_consumes_nothing_is_not_entered_again():
    """Contract: a loop whose body may be empty is a formula like any other, with any number of repetitions."""
    rules = Transcripts(spec("(next q (until (always t) ans))"))
    assert rules.monitor.valid(rules.start) == ("ans", "t")
    assert accepts(rules.monitor, "q ans")
    assert accepts(rules.monitor, "q" + 5 * " t" + " ans")
    assert not accepts(rules.monitor, "q t")
    nested = Monitor(spec("(next (always_2_3 (always_0_2 t)) ans)"))
    assert accepts(nested, "ans")  # two repetitions of nothing
    assert accepts(nested, "t t t ans")
    assert not accepts(nested, "t t t t t t t ans")


def test_limits():
    """An `or` over all states in an unbounded loop allows everything; `next` of single states is a fixed template."""
    free = Monitor(spec("(until (or t a b) ft)", env=""))
    rng = Random(0)
    position = free.start
    for _ in range(50):
        assert set(free.valid(position)) == {"ft", "t", "a", "b"}
        position = free.step(position, rng.choice(["t", "a", "b"]))
    fixed = Monitor(spec("(next q t ans)"))
    assert list(language(fixed, fixed.start)) == [("q", "t", "ans")]


def test_random_policy_obeys_always_under_the_mask_and_as_often_as_chance_without():
    monitor = Monitor(spec("(next (until_1_2 t a) ans)", env=""))
    states, rng, obeying = ["t", "a", "ans"], Random(1), 0
    for _ in range(10_000):
        position = monitor.start
        while position:
            position = monitor.step(position, rng.choice(monitor.valid(position)))
        assert monitor.fulfilled(position)
    for _ in range(10_000):
        obeying += accepts(monitor, " ".join(rng.choice(states) for _ in range(rng.choice([3, 4]))))
    # t a ans (1 of 27) and t t a ans (1 of 81), half of the draws each.
    assert obeying / 10_000 == pytest.approx(0.5 / 27 + 0.5 / 81, abs=0.005)


def test_distance_to_the_end():
    monitor = Monitor(spec(REACT))
    costs = {"t": 3.0, "a": 2.0, "ai": 2.0, "ft": 4.0, "ans": 1.0}
    assert [monitor.turns_to_end(after(monitor, states)) for states in ("", "q", "q t", "q t a ai o")] == [1, 0, 1, 0]
    # After the question: a loop's three states, or the end with two.
    assert monitor.cost_to_pause(after(monitor, "q"), costs) == 5.0
    assert monitor.cost_to_pause(after(monitor, "q t"), costs) == 4.0
    assert monitor.cost_to_pause(after(monitor, "q t a ai"), costs) == 0.0
    bounded = Monitor(spec("(until_2_4 (next t o) ft)"))
    assert (bounded.turns_to_end(bounded.start), bounded.turns_to_end(after(bounded, "t o"))) == (2, 1)
    assert bounded.cost_to_pause(bounded.start, {"t": 3.0, "ft": 1.0}) == 3.0


@pytest.mark.parametrize("name", shipped())
def test_shipped_specifications_read_what_they_write(name: str):
    rules = Transcripts(load_spec(name))
    position: Position | None = rules.start
    for action in ("search Kelmar founder", "search Dorvin", "answer Selat"):
        text = rules.write(position, action)
        assert text is not None
        reading = rules.read(position, text)
        assert (reading.violation, rules.commands(text)) == ("", [action])
        assert reading.position is not None
        position = rules.answered(reading.position)
    assert rules.monitor.fulfilled(position or ())


def test_turns_are_read_with_the_reason_and_place_of_a_violation():
    rules = Transcripts(load_spec("react").with_values({"action": ("search", "lookup")}))
    text = "[Thought] it may be\nin [Kelmar]\n[Action] Search\n[Input] x"
    assert [content for _, content in rules.read(rules.start, text).parts] == ["it may be\nin [Kelmar]", "Search", "x"]
    assert "'Search' is not among the values of action" in rules.read(rules.start, text).violation
    closest = Transcripts(rules.spec, closest=True)
    assert closest.commands(text) == ["search x"]
    assert closest.read(rules.start, text).violation == ""
    early = rules.read(rules.start, "[Thought] x\n[Answer] y")
    assert early.violation == "answer where action may come"
    assert early.at == len("[Thought] x\n")
    assert early.position is None
    assert rules.read(None, "[Answer] y").violation == ""  # after a violation, nothing is judged
    assert rules.read(rules.start, "[Thought] x").violation == "the turn ends before action"
    assert rules.read(rules.start, "search x").violation == "the turn begins with 'search x' instead of a state"
    assert rules.commands("search x") == ["search x"]


def test_a_fulfilled_formula_stays_so_or_begins_anew_with_the_next_turn():
    """Contract: fulfilled is what may end here, also where more may follow."""
    plan = spec("(next q p s (always_0_3 (next a o)))")
    once, anew = Transcripts(plan), Transcripts(plan, restarts=True)
    ended = once.read(once.start, "[p] x").position
    assert once.monitor.valid(once.next_turn(ended) or ()) == ("a",)
    assert anew.next_turn(ended) == anew.start
    assert once.next_turn(None) is anew.next_turn(None) is None
    assert first_violation(once, ["[p] x", "[a] y"]) is None
    assert first_violation(anew, ["[p] x", "[p] y", "[p] z"]) is None
    assert first_violation(anew, ["[p] x", "[a] y"]) == (1, "a where p may come")


def test_values_are_compared_exactly_then_loosely_and_fall_back_to_the_first():
    from stages.constraints.transcript import option_for

    values = ("Look Up", "Search", "SearchAll")
    contents = ["Search", "search", "lookup", "searchall please", "nonsense"]
    assert [option_for(content, values, closest=True) for content in contents] == [
        *("Search", "Search", "Look Up", "Search", "Look Up")
    ]
    assert [option_for(content, values, closest=False) for content in contents] == ["Search", None, None, None, None]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(states (q env)", "1 brackets are not closed"),
        ("(states (q env)) (behaviour (next q t))", "names the state 't'"),
        ('(states (q env) (t "[t]")) (behaviour q)', "does not use the state t"),
        ("(states (t)) (behaviour t)", "state t needs a text"),
        ('(states (t "[t]") (u "[t] x")) (behaviour (or t u))', "is part of another state's"),
        ('(states (t "[t]")) (behaviour (after t))', "unknown operator 'after'"),
        ('(states (t "[t]")) (behaviour (until_4_2 t t))', "needs 0 <= m <= n"),
        ('(states (t "[t]" (send "{u} {}"))) (behaviour t)', "names {u}"),
        ('(states (t "unfinished)) (behaviour t)', "needs a closing quotation mark"),
    ],
)
def test_invalid_specifications_are_refused_by_name(text: str, problem: str):
    with pytest.raises(SpecError, match=problem.replace("{", r"\{")):
        parse_spec(text, "mine")


@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [
        ("(next q a b)", "only b may come after a, within the turn"),
        ("(next q (until_2 (next a o) a) b)", "only b may come after a, within the turn"),
        ("(next q o a o b)", "o comes after q, both of the environment"),
    ],
)
def test_formulas_that_no_turn_could_obey_are_refused(behaviour: str, problem: str):
    """Contract: a state that begins only with a turn never has to come within one, and the environment never answers twice."""
    text = f'(states (q env) (o env) (a "A") (b "B" turn)) (behaviour {behaviour})'
    with pytest.raises(SpecError, match=problem):
        Transcripts(parse_spec(text if " o" in behaviour else text.replace("(o env) ", "")))


def test_two_possible_answers_of_the_environment_are_refused():
    with pytest.raises(SpecError, match="may answer with o or s"):
        Transcripts(spec("(next t (or o s) ans)"))


def test_no_episodes_have_no_conformance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: the command refuses an empty table, as rollout writes by default, instead of printing a share of nothing."""
    write_episodes(tmp_path / "episodes.parquet", [])
    with pytest.raises(SystemExit):
        main(["conformance", str(tmp_path / "episodes.parquet"), "--spec", "react"])
    assert "has no episodes" in capsys.readouterr().err
