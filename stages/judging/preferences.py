"""Preferences between answers to one task, from which a judge model learns: by a judge's opinion of pairs of rollouts, or from
annotate's pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from stages.judging.contract import Candidate, Judge, Question, Rubric, swapped
from stages.judging.local import LocalJudge
from stages.judging.orders import Asked
from stages.judging.principles import Margins, decide, language_rule, phrase_rule, signed, spreads, texts
from stages.judging.settings import JudgeModel, PrincipleSampling
from stages.seeding import permutation, stream

QUALITY = "quality"
"""Stands for the principle where there are none: the judge's own opinion."""

JUDGE_PREFERENCE_SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("first", pa.string()),
        ("second", pa.string()),
        ("answers", pa.list_(pa.string())),
        ("principles", pa.list_(pa.string())),
        ("prefers_first", pa.bool_()),
        ("clean", pa.bool_()),
        ("ruled", pa.bool_()),
    ]
)
"""`first`, `second`: names of the episodes; `principles`: as a judge reads them. `prefers_first` is the label to learn, `clean`
the label before noise, `ruled` whether a rule on phrases decided."""


@dataclass(frozen=True)
class Preference:
    """One label: whether the first of two answers is better, by the principles of the question."""

    question: Question
    prefers_first: bool
    clean: bool
    ruled: bool = False

    @property
    def task_id(self) -> str:
        return self.question.task_id

    def row(self) -> dict[str, object]:
        """A row of JUDGE_PREFERENCE_SCHEMA."""
        first, second = self.question.candidates
        return {
            "task_id": self.task_id,
            "first": first.name,
            "second": second.name,
            "answers": [first.answer, second.answer],
            "principles": list(self.question.rubric.principles),
            "prefers_first": self.prefers_first,
            "clean": self.clean,
            "ruled": self.ruled,
        }


def pairs_of(
    prompts: Mapping[str, str], answers: Mapping[str, Sequence[Candidate]], params: JudgeModel, seed: int
) -> list[Question]:
    """Questions that compare different answers to a task, at most `pairs` per task, in a fixed order; which of the two comes
    first is random."""
    made = []
    for task_id in sorted(answers):
        found = {(one.answer, one.steps): one for one in sorted(answers[task_id], key=lambda one: one.name)}
        kept = [one for one in found.values() if len(one.answer) >= params.shortest]
        for pair in permutation(itertools.combinations(kept, 2), "judge.pairs", seed, task_id)[: params.pairs]:
            ordered = tuple(permutation(pair, "judge.pair", seed, task_id, *(one.name for one in pair)))
            made.append(Question("pairwise", task_id, prompts[task_id], ordered))
    return made


def both_orders(judge: Judge, questions: Sequence[Question]) -> tuple[list[tuple[float, float] | None], Asked]:
    """(s_12, s_21) of each question, both for its first answer; None where a judgment failed. And all that was asked."""
    ordered = [item for question in questions for item in (question, swapped(question))]
    if isinstance(judge, LocalJudge):
        margins = judge.margins(questions)
        shown = [one for as_asked, turned in margins for one in (as_asked, -turned)]
        finite = [pair if all(map(math.isfinite, pair)) else None for pair in margins]
        return finite, [(one, judge.compared(one.rubric, margin)) for one, margin in zip(ordered, shown, strict=True)]
    judgments = judge.judge(ordered)
    found: list[tuple[float, float] | None] = []
    for one, other in zip(judgments[::2], judgments[1::2], strict=True):
        both = one.ok and other.ok
        found.append((one.scores[0] - one.scores[1], other.scores[1] - other.scores[0]) if both else None)
    return found, list(zip(ordered, judgments, strict=True))


def margins_of(judge: Judge, questions: Sequence[Question], sampling: PrincipleSampling | None) -> tuple[list[Margins], Asked]:
    """Each pair's margins by principle, and all that was asked. A pair with a failed judgment lacks that principle."""
    shown: list[tuple[str, tuple[str, ...]]] = [(QUALITY, ())]
    if sampling is not None:
        shown = [(one.name, (one.text,)) for one in sampling.items]
    asked = [
        (place, name, replace(question, rubric=Rubric(principles=principles)))
        for place, question in enumerate(questions)
        for name, principles in shown
    ]
    margins, judged = both_orders(judge, [question for _, _, question in asked])
    found: list[dict[str, tuple[float, float]]] = [{} for _ in questions]
    for (place, name, _), pair in zip(asked, margins, strict=True):
        if pair is not None:
            found[place][name] = pair
    return list(found), judged


def by_quality(questions: Sequence[Question], margins: Sequence[Margins]) -> list[Preference]:
    """A preference per pair on which both orders agree."""
    made = []
    for question, of_pair in zip(questions, margins, strict=True):
        score = signed(of_pair[QUALITY], 1.0) if QUALITY in of_pair else 0.0
        if score:
            made.append(Preference(question, score > 0, score > 0))
    return made


def by_principles(
    questions: Sequence[Question], margins: Sequence[Margins], sampling: PrincipleSampling, seed: int
) -> list[Preference]:
    """Preferences by sampled principles, `replicas` passes over the pairs."""
    divisors, made = spreads(margins, sampling.normaliser), []
    for replica in range(sampling.replicas):
        for question, of_pair in zip(questions, margins, strict=True):
            if not of_pair:
                continue
            rng = stream("judge.principles", seed, replica, question.key)
            first, second = question.candidates
            rule = phrase_rule(first.answer, second.answer, sampling, rng)
            if sampling.languages:
                both, stays = language_rule(question.prompt, first.answer, second.answer)
                if both:
                    continue
                rule = rule if stays is None else stays
            scores = {name: signed(pair, divisors[name], sampling.sign_agreement) for name, pair in of_pair.items()}
            decision = decide(scores, sampling, rng, rule)
            if decision is None:
                continue
            rubric = Rubric(principles=texts(sampling.items, decision.shown))
            made.append(Preference(replace(question, rubric=rubric), decision.first, decision.clean, decision.ruled))
    return made


def from_trees(prompts: Mapping[str, str], compared: Iterable[tuple[str, Candidate, Candidate]], seed: int) -> list[Preference]:
    """A preference per (task, better, worse candidate); which of the two comes first is random."""
    made = []
    for task_id, win, lose in compared:
        first = stream("judge.tree_pair", seed, task_id, win.name, lose.name).random() < 0.5
        shown = (win, lose) if first else (lose, win)
        made.append(Preference(Question("pairwise", task_id, prompts[task_id], shown), first, first))
    return made
