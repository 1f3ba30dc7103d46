"""Behaviour specifications: named states of an agent, and a formula over them that says in which order they may occur.

Crouse et al., "Formally Specifying the High-Level Behavior of LLM-Based Agents" (arXiv 2310.08535). A specification is a text of
S-expressions:

    (states
      (question env)                     ; env: what the environment says, the task or an observation
      (thought "[Thought]")              ; the text that begins the state
      (action "[Action]" (values search lookup))
      (input "[Input]" (send "{action} {}"))
      (observation env)
      (answer "[Answer]" (send "answer {}")))
    (behaviour (next question (until_5 (next thought action input observation) answer)))

Formulas: a state; `(next e1 ... ek)`: one after the other; `(until_m_n e s)`: m to n times e, then the state s (`until_n`: 0 to
n, `until`: 0 to 1000); `(always_m_n e)`: m to n times e, until what follows begins; `(or e1 ... ek)`: one of them. Exactly one
state holds at a time.

Of a state: `turn`: its text begins it only at the start of a turn; `(values a b)`: its content is one of these; `(send "...")`:
what is sent to the environment, {} being its content and {name} the newest content of another state; `(say "...")`: its content
in demonstrations, where the environment's expert has no word for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stages.records.card import Card

CARD = Card(
    slug="ltl_spec",
    title="Behaviour formulas",
    paper="Crouse et al., Formally Specifying the High-Level Behavior of LLM-Based Agents, arXiv 2310.08535",
    equation="a monitor of (next e1 .. ek), (until_m_n e s), (always_m_n e) and (or e1 .. ek) over named states says which "
    "states may come next; pi_C(t | h) = pi(t | h) [t in A(h)] / sum over A(h) of pi, also in the training pass; a token with "
    "|A| = 1 is in no loss and no denominator",
    assumptions="the formula says nothing about contents, and a mask renormalises token by token, which is not sampling from the "
    "policy under the condition: removed_nats measures how far it is forced. Where turns or tokens run short, only states remain "
    "that reach the end in time (budget_exit shortest_path, ours). Reflexion here never reads the right answer",
    reduces_to="or over all states in an unbounded until: no constraint; next of single states: a template; one closed list: "
    "classification",
    tested_by="tests/constraints/test_monitor.py, tests/agent/test_constrained_engine.py, tests/environments/test_constrained.py",
    switch="per_domain.<domain>.environment.constraint: {spec: react}",
)

SHIPPED = Path(__file__).resolve().parent / "specs"
MOST = 1000
"""Repetitions of `until` and `always` without a number."""
_TOKEN = re.compile(r'\s*(?:;[^\n]*\n?\s*)*(?:([()])|"((?:[^"\\]|\\.)*)"|([^\s()";]+))')
_LOOP = re.compile(r"(until|always)(?:_(\d+))?(?:_(\d+))?")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class SpecError(ValueError):
    """A specification is not valid."""


@dataclass(frozen=True)
class State:
    """A state as a formula: it occurs once."""

    name: str


@dataclass(frozen=True)
class Or:
    """Exactly one of `parts`."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True)
class Next:
    """All of `parts`, one after the other."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True)
class Loop:
    """`body` from `least` to `most` times; then `exit`, or, if that is None, what follows the loop."""

    body: Formula
    exit: State | None
    least: int
    most: int


Formula = State | Or | Next | Loop


@dataclass(frozen=True)
class StateInfo:
    """What a state looks like in a transcript."""

    name: str
    text: str = ""
    """What begins it; "" for states of the environment."""
    env: bool = False
    turn: bool = False
    values: tuple[str, ...] = ()
    send: str = ""
    say: str = ""


@dataclass(frozen=True)
class Spec:
    """A checked specification."""

    name: str
    states: Mapping[str, StateInfo] = field(hash=False)
    behaviour: Formula

    def with_values(self, values: Mapping[str, tuple[str, ...]]) -> Spec:
        """The specification with other closed lists of contents. Raises SpecError for a state that has no content of the
        policy."""
        if wrong := [name for name in values if name not in self.states or self.states[name].env]:
            named = ", ".join(name for name, state in self.states.items() if not state.env)
            raise SpecError(f"values of '{wrong[0]}', which is no state of the policy in {self.name}; there are {named}")
        changed = {name: replace(self.states[name], values=tuple(listed)) for name, listed in values.items()}
        return _checked(replace(self, states={**self.states, **changed}))


def _expressions(text: str, name: str) -> list[Any]:
    """Nested lists of the atoms (str) and strings (('string', text)) of a text. Raises SpecError for unbalanced brackets."""
    stack: list[list[Any]] = [[]]
    at = 0
    text = text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            if re.fullmatch(r"\s*(;[^\n]*\s*)*", text[at:]):
                break
            raise SpecError(f"{name}: can't read {text[at : at + 20]!r}; a string needs a closing quotation mark")
        at = found.end()
        bracket, string, atom = found.groups()
        if bracket == "(":
            stack.append([])
        elif bracket == ")":
            if len(stack) == 1:
                raise SpecError(f"{name}: a bracket closes nothing")
            closed = stack.pop()
            stack[-1].append(closed)
        else:
            stack[-1].append(("string", re.sub(r"\\(.)", r"\1", string)) if string is not None else atom)
    if len(stack) > 1:
        raise SpecError(f"{name}: {len(stack) - 1} brackets are not closed")
    return stack[0]


def _plain(value: Any) -> str:
    return str(value[1]) if isinstance(value, tuple) else str(value)


def _state(item: Any, name: str) -> StateInfo:
    if not isinstance(item, list) or not item or not isinstance(item[0], str) or not _NAME.fullmatch(item[0]):
        raise SpecError(f'{name}: a state must be (name "text" ...), its name lower-case letters, digits, _; not {item!r}')
    text, flags, texts = "", set(), {"send": "", "say": ""}
    values: tuple[str, ...] = ()
    for part in item[1:]:
        if isinstance(part, tuple):
            text = _plain(part)
        elif part in ("env", "turn"):
            flags.add(part)
        elif isinstance(part, list) and len(part) > 1 and part[0] == "values":
            values = tuple(_plain(value) for value in part[1:])
        elif isinstance(part, list) and len(part) == 2 and part[0] in texts:
            texts[part[0]] = _plain(part[1])
        else:
            known = '"text", env, turn, (values ...), (send "..."), (say "...")'
            raise SpecError(f"{name}: state {item[0]} has {part!r}; it may have {known}")
    return StateInfo(item[0], text, "env" in flags, "turn" in flags, values, **texts)


def _formula(item: Any, states: Mapping[str, StateInfo], name: str) -> Formula:
    if isinstance(item, str):
        if item not in states:
            raise SpecError(f"{name}: the behaviour names the state '{item}', which (states ...) does not have")
        return State(item)
    if not isinstance(item, list) or len(item) < 2 or not isinstance(item[0], str):
        raise SpecError(
            f"{name}: a formula must be a state or (next ...), (until_m_n e s), (always_m_n e), (or ...); not {item!r}"
        )
    head, parts = item[0], tuple(_formula(part, states, name) for part in item[1:])
    if head in ("next", "or"):
        return Next(parts) if head == "next" else Or(parts)
    loop = _LOOP.fullmatch(head)
    if loop is None:
        raise SpecError(f"{name}: unknown operator '{head}'; known: next, until, always, or")
    numbers = [int(number) for number in loop.groups()[1:] if number is not None]
    least, most = (numbers[0], numbers[1]) if len(numbers) == 2 else (0, numbers[0] if numbers else MOST)
    if not 0 <= least <= most or most < 1:
        raise SpecError(f"{name}: {head} needs 0 <= m <= n and n >= 1")
    if loop[1] == "always":
        if len(parts) != 1:
            raise SpecError(f"{name}: {head} has one formula, not {len(parts)}")
        return Loop(parts[0], None, least, most)
    if len(parts) != 2 or not isinstance(parts[1], State):
        raise SpecError(f"{name}: {head} needs a formula and the single state that ends it")
    return Loop(parts[0], parts[1], least, most)


def named(formula: Formula) -> Iterator[str]:
    """The names of a formula's states, with repetitions."""
    if isinstance(formula, State):
        yield formula.name
    elif isinstance(formula, Loop):
        yield from named(formula.body)
        yield from named(formula.exit) if formula.exit is not None else ()
    else:
        for part in formula.parts:
            yield from named(part)


def _checked(spec: Spec) -> Spec:
    """The specification. Raises SpecError for states that a transcript could not tell apart."""
    texts = [state.text for state in spec.states.values() if not state.env]
    for state in spec.states.values():
        if not state.env and not state.text.strip():
            raise SpecError(f"{spec.name}: state {state.name} needs a text that begins it, or env")
        if state.env and (state.text or state.values or state.send or state.say or state.turn):
            raise SpecError(f"{spec.name}: state {state.name} is of the environment (env), so it has nothing else")
        for other in re.findall(r"{(\w+)}", state.send):
            if other not in spec.states or spec.states[other].env:
                raise SpecError(f"{spec.name}: (send ...) of {state.name} names {{{other}}}, which is no state of the policy")
    for one in texts:
        if texts.count(one) > 1 or any(one in other for other in texts if other != one):
            raise SpecError(f"{spec.name}: the text {one!r} of a state is part of another state's; each needs its own")
    if unused := sorted(set(spec.states) - set(named(spec.behaviour))):
        raise SpecError(f"{spec.name}: the behaviour does not use the state {unused[0]}; use it, or leave it out")
    return spec


def parse_spec(text: str, name: str = "specification") -> Spec:
    """Raises SpecError, which says what is wrong."""
    parts = {
        item[0]: item[1:] for item in _expressions(text, name) if isinstance(item, list) and item and isinstance(item[0], str)
    }
    if set(parts) != {"states", "behaviour"} or len(parts["behaviour"]) != 1:
        raise SpecError(f"{name}: needs (states ...) and (behaviour <formula>), and nothing else")
    listed = [_state(item, name) for item in parts["states"]]
    states = {state.name: state for state in listed}
    if len(states) != len(listed):
        raise SpecError(f"{name}: two states have the same name")
    return _checked(Spec(name, states, _formula(parts["behaviour"][0], states, name)))


def shipped() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.sexp"))


def is_file(kind: str, spec: str) -> bool:
    """Whether `spec` names a file of the user's; regular expressions and shipped specifications are none."""
    return kind != "regex" and not (kind == "ltl" and bool(_NAME.fullmatch(spec)))


def spec_text(kind: str, spec: str) -> str:
    """The text of a specification: a shipped one by name, a file's, or the regular expression itself. Raises SpecError for what
    can't be read."""
    if kind == "regex":
        return spec
    path = Path(spec) if is_file(kind, spec) else SHIPPED / f"{spec}.sexp"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        if kind != "ltl":
            raise SpecError(f"constraint.spec: the file '{spec}' can't be read: {error.strerror}") from error
        raise SpecError(f"'{spec}' is neither a shipped specification ({', '.join(shipped())}) nor a readable file") from error


def load_spec(name: str) -> Spec:
    """A shipped specification by name, or the file of that name. Raises SpecError if there is none."""
    return parse_spec(spec_text("ltl", name), name)
