"""Rewards of whole groups by a judge: tournaments, absolute scores or checklists, for many groups at the same time.

All groups' tournaments advance together, so that a server or a local model gets one large batch of questions per round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from stages.judging.contract import Candidate, Judge, Question, Rubric
from stages.judging.measures import TIE
from stages.judging.orders import Asked, Match, OnFailure, play, slots_of
from stages.judging.ratings import fit, win_counts
from stages.judging.tournaments import SCHEMES, Pair, Result, Rounds, Rules, match_count
from stages.seeding import stream

SINGLE = ("pointwise", "checklist")
"""Schemes that judge each candidate on its own."""


@dataclass(frozen=True)
class Scoring:
    """How a group is scored. scheme: of SCHEMES, pointwise or checklist; reward: for tournaments, rewards by rank, by strengths
    fitted to all matches (stages/judging/ratings.py), or the mean score itself; calls: judge calls per group, None for as few as
    the scheme needs; more repeat each question, and scores are averaged."""

    scheme: str = "seeded_single_elimination"
    rules: Rules = field(default_factory=Rules)
    reward: Literal["rank", "bradley_terry", "thurstone", "score"] = "rank"
    ridge: float = 0.1
    swap: bool = True
    on_failure: OnFailure = "tie"
    calls: int | None = None
    rubric: Rubric = field(default_factory=Rubric)

    def calls_once(self, size: int) -> int:
        """Judge calls of a group of `size` if each question is asked once."""
        if self.scheme in SINGLE:
            return size
        return match_count(self.scheme, size, self.rules) * (2 if self.swap else 1)

    def repeats(self, size: int) -> int:
        """How often each question is asked. Raises ValueError for fewer calls than the scheme needs."""
        needed = self.calls_once(size)
        if self.calls is not None and self.calls < needed:
            raise ValueError(
                f"rl.judge.calls_per_group is {self.calls}, and {self.scheme} of {size} candidates takes {needed} judge calls; "
                f"raise it to at least that, or choose another rl.judge.scheme"
            )
        return 1 if self.calls is None else self.calls // max(needed, 1)


@dataclass(frozen=True)
class Group:
    """Candidates for one task; candidate 0 is the anchor."""

    task_id: str
    prompt: str
    candidates: tuple[Candidate, ...]
    reference: str = ""
    principles: tuple[str, ...] = ()
    """In words, in place of the rubric's."""
    items: tuple[str, ...] = ()
    """Of the task's own checklist, in place of the rubric's."""


@dataclass
class Scored:
    """`rewards` by candidate; `scores`: its mean score in points, half of S for a match; `results` of all matches; `errors`:
    standard errors of rewards that are fitted strengths."""

    rewards: tuple[float, ...] = ()
    scores: list[float] = field(default_factory=list)
    results: list[tuple[Pair, Result]] = field(default_factory=list)
    errors: tuple[float, ...] = ()


def score_groups(judge: Judge, groups: Sequence[Group], scoring: Scoring, seed: int) -> tuple[list[Scored], Asked]:
    """Each group's rewards, and all that was asked. Raises ValueError for a group of one in a tournament, and JudgeError."""
    if scoring.scheme in SINGLE:
        return _singly(judge, groups, scoring)
    return _tournaments(judge, groups, scoring, seed)


def _rubric(group: Group, rubric: Rubric) -> Rubric:
    """Without steps there is no process to score; a group may have its own principles and items."""
    rubric = replace(rubric, principles=group.principles) if group.principles else rubric
    rubric = replace(rubric, items=group.items) if group.items else rubric
    return rubric if any(one.steps for one in group.candidates) else replace(rubric, process_weight=0.0)


def _singly(judge: Judge, groups: Sequence[Group], scoring: Scoring) -> tuple[list[Scored], Asked]:
    kind: Literal["pointwise", "checklist"] = "checklist" if scoring.scheme == "checklist" else "pointwise"
    questions = [
        Question(kind, group.task_id, group.prompt, (candidate,), _rubric(group, scoring.rubric), group.reference, repeat)
        for group in groups
        for candidate in group.candidates
        for repeat in range(scoring.repeats(len(group.candidates)))
    ]
    asked = list(zip(questions, judge.judge(questions), strict=True))
    waiting = iter(asked)
    neutral = 0.5 if kind == "checklist" else scoring.rubric.scale / 2
    made = []
    for group in groups:
        means: list[float | None] = []
        for _ in group.candidates:
            found = []
            for _ in range(scoring.repeats(len(group.candidates))):
                question, judgment = next(waiting)
                scores = slots_of(judgment, question.slots, neutral, group.task_id, scoring.on_failure)
                found += [sum(scores) / len(scores)] if scores else []
            means.append(sum(found) / len(found) if found else None)
        known = [mean for mean in means if mean is not None]
        # What was dropped says nothing: the mean of the others, which has no advantage over them.
        dropped = sum(known) / len(known) if known else neutral
        filled = [dropped if mean is None else mean for mean in means]
        made.append(Scored(tuple(filled), filled))
    return made, asked


@dataclass
class _Running:
    """A group's tournament: what it waits for, until it has rewards."""

    group: Group
    rounds: Rounds
    pairs: list[Pair]
    scored: Scored = field(default_factory=Scored)
    played: dict[Pair, int] = field(default_factory=dict)
    """Matches of a pair so far, seeding included: a rematch is a new question."""

    def matches(self, repeats: int, rubric: Rubric) -> list[Match]:
        made = []
        for pair in self.pairs:
            first, second = (self.group.candidates[entrant] for entrant in pair)
            key = (min(pair), max(pair))
            before = self.played.get(key, 0)
            self.played[key] = before + repeats
            task = (self.group.task_id, self.group.prompt)
            made += [Match(*task, first, second, rubric, self.group.reference, before + turn) for turn in range(repeats)]
        return made


def _tournaments(judge: Judge, groups: Sequence[Group], scoring: Scoring, seed: int) -> tuple[list[Scored], Asked]:
    running = []
    for group in groups:
        size = len(group.candidates)
        if size < 2:
            raise ValueError(f"task {group.task_id}: a tournament needs at least two candidates; set rl.group_size to 2 or more")
        names = [candidate.name for candidate in group.candidates]
        rounds = SCHEMES[scoring.scheme](size, stream("judging.tournament", seed, group.task_id, *names), scoring.rules)
        running.append(_Running(group, rounds, next(rounds)))
    asked: Asked = []
    waiting = list(running)
    while waiting:
        matches = [
            match
            for one in waiting
            for match in one.matches(scoring.repeats(len(one.group.candidates)), _rubric(one.group, scoring.rubric))
        ]
        results, further = play(judge, matches, scoring.swap, scoring.on_failure)
        asked += further
        at = 0
        for one in waiting:
            repeats = scoring.repeats(len(one.group.candidates))
            own = results[at : at + repeats * len(one.pairs)]
            at += repeats * len(one.pairs)
            _advance(one, [_mean(own[start : start + repeats]) for start in range(0, len(own), repeats)])
        waiting = [one for one in waiting if not one.scored.rewards]
    for one in running:
        _finish(one.scored, len(one.group.candidates), scoring)
    return [one.scored for one in running], asked


def _mean(results: Sequence[Result]) -> Result:
    """The mean result of a match that was repeated; None if all were dropped."""
    known = [result for result in results if result is not None]
    if not known:
        return None
    return sum(one for one, _ in known) / len(known), sum(other for _, other in known) / len(known)


def _advance(one: _Running, results: list[Result]) -> None:
    """Give a tournament its results; sets the rewards when it is over."""
    one.scored.results += list(zip(one.pairs, results, strict=True))
    try:
        one.pairs = one.rounds.send(results)
    except StopIteration as stop:
        one.scored.rewards = stop.value


def _finish(scored: Scored, size: int, scoring: Scoring) -> None:
    """Set the mean scores, and rewards that are not by rank."""
    points: list[list[float]] = [[] for _ in range(size)]
    for pair, result in scored.results:
        for entrant, score in zip(pair, result or (), strict=False):
            points[entrant].append(score / 2)
    scored.scores = [sum(found) / len(found) if found else scoring.rubric.scale / 2 for found in points]
    if scoring.reward == "score":
        scored.rewards = tuple(scored.scores)
    if scoring.reward in ("bradley_terry", "thurstone"):
        won = [
            (*pair, 0.5 if abs(result[0] - result[1]) <= TIE else float(result[0] > result[1]))
            for pair, result in scored.results
            if result is not None
        ]
        fitted = fit(win_counts(size, won), scoring.reward, scoring.ridge)
        # Groups whose matches are all tied have strengths of exactly 0, not of the last bit's size.
        scored.rewards = tuple(round(float(strength), 9) for strength in fitted.strengths)
        scored.errors = tuple(float(error) for error in fitted.errors)
