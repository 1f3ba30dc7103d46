"""Rules of search self-play (arXiv 2510.18821): settings, the gate for proposed questions, the proposer's rewards and the pool of
problems. stages/algorithms/sources/self_play.py plays by them. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.agent.prompts import check_prompt, load_prompt
from stages.algorithms.parts.loss import WithoutKl
from stages.environments.self_play import proposed_question
from stages.runtime.validation import Count, Positive, Section, Share, refuse_idle

if TYPE_CHECKING:
    from stages.algorithms.batch import TrajectoryBatch
    from stages.records.episode import TurnRecord
    from stages.records.task import Task

VALID = "valid"
"""Reward term of a proposer's episode: 1 if its question passed the gate, else 0."""
QUERY = "search "
"""Start of an action that counts as a query."""

REASONS = (
    *("no_question", "length", "words", "answer_in_question", "no_evidence", "few_queries", "repeated_query"),
    *("answer_in_query", "reader"),
)
"""Why a proposal fails the gate, in the order of the checks."""


class Proposer(Section):
    """How questions are proposed."""

    n: Annotated[int, Field(ge=0)] = 1
    """Proposals per answer, one group; tasks_per_step must be a multiple. 0: none, the solver gets the curated questions."""
    reward: Literal["one_minus_acc", "intermediate", "format_only"] = "one_minus_acc"
    """Of a question that passes the gate, with solve rate s: 1 - s; 4 (left + s) (right - s) if 0 < s < 1, else 0; or 1."""
    left: float = 0.0
    """reward intermediate."""
    right: float = 1.0
    """reward intermediate."""
    fail_reward: float = 0.0
    """Of a proposal that fails the gate. With one proposal per answer and 0, failures have no gradient, of the KL term neither.
    The published script has 0, its settings file -1; with a penalty of -0.1 the authors saw a collapse."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps before the proposer learns."""
    prompt: str = ""
    """Template in data/raw/prompts with {answer}, {hops}, {examples}, and {topic} where the domain names one. Empty:
    proposer.txt, or proposer_topic.txt for domains that name a topic."""
    examples: Annotated[int, Field(ge=0)] = 3
    """Questions of other curated tasks with as many facts that the prompt shows."""

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, name: str) -> str:
        return check_prompt(name, ("answer",), ("hops", "examples", "topic")) if name else name

    @model_validator(mode="after")
    def _used(self) -> Proposer:
        need = self.reward == "intermediate", "reward intermediate"
        refuse_idle(self, "", {"left": need, "right": need})
        return self


class Gate(Section):
    """Which proposals become problems."""

    rules: bool = True
    """The rules below."""
    min_characters: Count = 10
    """Of a question."""
    max_characters: Count = 1000
    """Of a question."""
    min_words: Annotated[int, Field(ge=0)] = 10
    """Of a question, separated by white space."""
    min_queries: Annotated[int, Field(ge=0)] = 2
    """Searches of a proposer's episode; all must differ."""
    forbid_answer_in_queries: bool = False
    """Whether the answer may be in no search."""
    reader: Literal["policy", "rules", "none"] = "policy"
    """Who must find the answer again in what the proposer's tools showed: the policy itself, in one turn without tools; the
    domain's rules (`Domain.read`); or nobody."""
    noisy_blobs: Annotated[int, Field(ge=0)] = 4
    """reader: what the tools showed in so many other episodes of the step is mixed in (fewer if there are fewer)."""
    reader_temperature: Positive = 0.1
    """reader policy: sampling temperature."""
    reader_tokens: Count = 70
    """reader policy: tokens of its turn at most."""
    on_reader_error: Literal["reject", "accept"] = "reject"
    """What becomes of a question whose reader gave no answer at all, for lack of tokens or of the right form. The authors' code
    accepts it."""
    prompt: str = "reader.txt"
    """reader policy: template in data/raw/prompts with {evidence} and {question}."""

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, name: str) -> str:
        return check_prompt(name, ("evidence", "question"), ())

    @model_validator(mode="after")
    def _used(self) -> Gate:
        rules = ("min_characters", "max_characters", "min_words", "min_queries", "forbid_answer_in_queries")
        asked = ("reader_temperature", "reader_tokens", "on_reader_error", "prompt")
        refuse_idle(
            *(self, ""),
            {
                **dict.fromkeys(rules, (self.rules, "rules true")),
                "noisy_blobs": (self.reader != "none", "reader policy or rules"),
                **dict.fromkeys(asked, (self.reader == "policy", "reader policy")),
            },
        )
        return self


class Completion(Section):
    """What fills the slots of proposals that failed, so that every step has tasks_per_step problems."""

    strategy: Literal["reuse", "dummy", "resample"] = "reuse"
    """reuse: problems of earlier steps; dummy: a prompt that says the answer; resample: more copies of this step's problems."""
    max_success: Share = 1.0
    """reuse: pooled problems with at most this solve rate come first."""
    clear_every: Count = 10
    """Steps from one clearing of the pool to the next."""
    keep_ratio: Share = 0.0
    """Share of the pool, its newest problems, that a clearing keeps."""
    prompt: str = "dummy.txt"
    """Template in data/raw/prompts with {answer}, where nothing else fills a slot."""

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, name: str) -> str:
        return check_prompt(name, ("answer",), ())

    @model_validator(mode="after")
    def _used(self) -> Completion:
        need = self.strategy == "reuse", "strategy reuse"
        refuse_idle(self, "", dict.fromkeys(("max_success", "clear_every", "keep_ratio"), need))
        return self


class Updates(Section):
    """Who learns from a step."""

    proposer: bool = True
    """Whether proposals are trained on; false: a frozen proposer, the policy as the solver's updates make it."""
    solver: bool = True
    """Whether the solver's episodes are trained on."""
    first: Literal["proposer", "solver"] = "proposer"
    """Whose updates come first."""
    combine: bool = False
    """One optimiser step on the sum of both losses, in place of one after the other's."""

    @model_validator(mode="after")
    def _combines(self) -> Updates:
        if self.combine and not (self.proposer and self.solver):
            raise ValueError("combine: true adds up the losses of proposer and solver, and one of them is false; set it to true")
        if self.combine and "first" in self.model_fields_set:
            raise ValueError("first has no effect with combine: true, which updates on both at once; remove it")
        return self


class SelfPlaySettings(Section):
    """`rl.tasks.settings` of source self_play."""

    proposer: Proposer = Proposer()
    gate: Gate = Gate()
    completion: Completion = Completion()
    updates: Updates = Updates()

    @model_validator(mode="after")
    def _somebody_learns(self) -> SelfPlaySettings:
        if not (self.updates.proposer or self.updates.solver):
            raise ValueError("updates.proposer and updates.solver are both false, which trains nothing; set one to true")
        if not (self.proposer.n or self.updates.solver):
            raise ValueError(
                "proposer.n is 0, so that there are no proposals, and updates.solver is false, which trains nothing; set one of "
                "them to another value"
            )
        if self.proposer.warmup_steps and not self.updates.proposer:
            raise ValueError("proposer.warmup_steps has no effect with updates.proposer: false; remove it")
        return self


@dataclass(frozen=True)
class Proposal:
    """What a proposer's episode came to. `question`: "" if it proposed none; `evidence`: what each tool call showed."""

    answer: str
    question: str
    queries: Sequence[str]
    evidence: Sequence[str]


def proposal_of(answer: str | Sequence[str], turns: Sequence[TurnRecord]) -> Proposal:
    """What a proposer's turns came to. Refused actions count neither as searches nor as evidence; tools may be free."""
    from stages.records.tools import number_of_calls

    calls = [turn for turn in turns if turn.accepted and number_of_calls(turn) > 0]
    actions = (turn.action.strip() for turn in calls)
    return Proposal(
        answer=target(answer),
        question=proposed_question(turns[-1].action) if turns else "",
        queries=[" ".join(action[len(QUERY) :].lower().split()) for action in actions if action.lower().startswith(QUERY)],
        evidence=[turn.observation for turn in calls],
    )


def proposer_prompt_name(proposer: Proposer, domain: Any) -> str:
    """The file of the proposer's template."""
    return proposer.prompt or ("proposer_topic.txt" if hasattr(domain, "topic") else "proposer.txt")


def proposer_prompt(proposer: Proposer, domain: Any, seed: Task, tasks: Mapping[str, Task], rng: Random) -> str:
    """The proposer's prompt for the answer of `seed`, with examples from other `tasks` of its difficulty."""
    same = [task for _, task in sorted(tasks.items()) if task.difficulty == seed.difficulty and task.task_id != seed.task_id]
    return load_prompt(proposer_prompt_name(proposer, domain)).fill(
        answer=target(seed.spec["answer"]),
        hops=f"{seed.difficulty:g}",
        topic=domain.topic(seed) if hasattr(domain, "topic") else "",
        examples="\n".join(task.prompt for task in rng.sample(same, min(proposer.examples, len(same)))),
    )


def target(answer: str | Sequence[str]) -> str:
    """The answer, given as text or as a list whose first item it is."""
    return answer if isinstance(answer, str) else answer[0]


def failed_rule(proposal: Proposal, gate: Gate) -> str:
    """The first of REASONS for which a proposal fails the rules; "" if it passes."""
    text, answer = proposal.question, proposal.answer.lower()
    checks = {
        "no_question": not text,
        "length": not gate.min_characters <= len(text) <= gate.max_characters,
        "words": len(text.split()) < gate.min_words,
        "answer_in_question": answer in text.lower(),
        "no_evidence": not proposal.evidence,
        "few_queries": len(proposal.queries) < gate.min_queries,
        "repeated_query": len(set(proposal.queries)) < len(proposal.queries),
        "answer_in_query": gate.forbid_answer_in_queries and any(answer in query.lower() for query in proposal.queries),
    }
    wanted = checks if gate.rules else ("no_question",)
    return next((name for name in wanted if checks[name]), "")


def mixed_evidence(own: Sequence[str], others: Sequence[Sequence[str]], count: int, rng: Random) -> str:
    """A proposal's evidence and that of `count` others (or all, if there are fewer), in random order."""
    blobs = ["\n".join(one) for one in [own, *rng.sample(list(others), min(count, len(others)))]]
    rng.shuffle(blobs)
    return "\n".join(blobs)


def proposer_reward(solve_rate: float, proposer: Proposer) -> float:
    """R of a question that passed the gate, from the share of the solver's episodes that were right (paper, section 3)."""
    if proposer.reward == "format_only":
        return 1.0
    if proposer.reward == "one_minus_acc":
        return 1.0 - solve_rate
    inside = 0.0 < solve_rate < 1.0
    return 4.0 * (proposer.left + solve_rate) * (proposer.right - solve_rate) if inside else 0.0


def without_kl_of_failures(batch: TrajectoryBatch) -> TrajectoryBatch:
    """A proposer's prepared batch in which proposals that failed the gate have no KL term where they have no advantage: they
    change no weight, and still count in the loss's denominators."""
    assert batch.advantages is not None
    return batch.with_extra(WithoutKl((batch.terms[VALID] == 0) & ~(batch.advantages != 0).any(1)))


class ProblemPool:
    """Problems of earlier steps with their solve rates, oldest first; `problems` are JSON values, for checkpoints."""

    def __init__(self, completion: Completion) -> None:
        self.completion = completion
        self.problems: list[dict[str, Any]] = []

    def draw(self, count: int, rng: Random, rate: Callable[[Mapping[str, Any]], float] = lambda one: one["rate"]) -> list[dict]:
        """`count` different problems, or all: those with a low enough solve rate first, each kind in random order."""
        order = rng.sample(range(len(self.problems)), len(self.problems))
        order.sort(key=lambda place: rate(self.problems[place]) > self.completion.max_success)
        return [self.problems[place] for place in order[:count]]

    def add(self, problems: Sequence[Mapping[str, Any]]) -> None:
        """Add problems with their newest solve rates; known ones (by "task_id") move to the end."""
        names = {problem["task_id"] for problem in problems}
        self.problems = [one for one in self.problems if one["task_id"] not in names] + [dict(problem) for problem in problems]

    def end_step(self, step: int) -> None:
        """Clear the pool if step `step`, from 0, is the last of `clear_every`."""
        if (step + 1) % self.completion.clear_every == 0:
            kept = round(self.completion.keep_ratio * len(self.problems))
            self.problems = self.problems[len(self.problems) - kept :]
