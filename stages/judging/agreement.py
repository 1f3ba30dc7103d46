"""How far a judge's preferences agree with labels that are known: a planted truth, or those of people. Pure functions."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.judging.contract import Candidate, Question
from stages.judging.measures import brier_score, calibration, cohen_kappa, flip_rate, krippendorff_alpha, verdict
from stages.records.messages import well_formed
from stages.seeding import stream

Margin = tuple[float, float] | None
"""(s_12, s_21) of a pair, both for its first answer; None where a judgment failed."""
NAMES = {"first": 1, "tie": 0, "second": -1}


def against(margins: Sequence[Margin], labels: Sequence[Sequence[int | None]], alpha: bool = False) -> dict[str, float]:
    """A judge's preferences beside labels[pair][rater]: 1 the first answer is better, -1 the second is, 0 neither, None no label.

    Over pairs that were judged and on which the raters' majority decides: `accuracy` (a tie of the judge is half right), Cohen's
    `kappa`, `brier` and `calibration_error` of the share of its orders that prefer the first, `flip_rate`. With `alpha`,
    Krippendorff's alpha of all raters and the judge, and of the raters alone if there are several (extra `judging`).
    """
    majority = [verdict(sum(one for one in of if one is not None), 0) for of in labels]
    judged = [(margin, label) for margin, label in zip(margins, majority, strict=True) if margin is not None and label]
    found = {"pairs": float(len(labels)), "failed": float(margins.count(None)), "compared": float(len(judged))}
    if judged:
        said = [verdict(sum(margin), 0) for margin, _ in judged]
        shares = [statistics.fmean((verdict(one, 0) + 1) / 2 for one in margin) for margin, _ in judged]
        truth = [label for _, label in judged]
        outcomes = [(label + 1) / 2 for label in truth]
        found |= {
            "accuracy": statistics.fmean(1 - abs(one - label) / 2 for one, label in zip(said, truth, strict=True)),
            "kappa": cohen_kappa(said, truth),
            "ties": said.count(0) / len(said),
            "brier": brier_score(shares, outcomes),
            "calibration_error": calibration(shares, outcomes)[0],
            "flip_rate": flip_rate([(one, 0) for (one, _), _ in judged], [(other, 0) for (_, other), _ in judged]),
        }
    if alpha and labels:
        rows: list[list[float | None]] = [list(one) for one in zip(*labels, strict=True)]
        judge = [None if margin is None else float(verdict(sum(margin), 0)) for margin in margins]
        found["alpha"] = krippendorff_alpha([*rows, judge], "ordinal")
        if len(rows) > 1:
            found["alpha_people"] = krippendorff_alpha(rows, "ordinal")
    return found


def kappa_below(found: Mapping[str, Any], least: float | None) -> float | None:
    """Cohen's kappa in `found`, as of `against` (0 if nothing was compared), if it is below `least`; None if it is not, or if
    `least` is None."""
    kappa: float = found.get("kappa", 0.0)
    return kappa if least is not None and kappa < least else None


def read_labels(path: Path) -> tuple[list[Question], list[list[int | None]]]:
    """Pairs, and labels [pair][rater], from lines of JSON with `prompt` and either `chosen` and `rejected`, shown in an order by
    chance, or `first`, `second` and `labels`, a list of "first", "second", "tie" or null by rater; both may have a `reference`.

    Raises FileNotFoundError, and ValueError naming file and line.
    """
    questions, labels = [], []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = json.loads(text.decode("utf-8", errors="replace"))
            names, given = ("first", "second"), line.get("labels")
            if given is None:
                turned = stream("judge.labels", number).random() < 0.5
                names, given = ("rejected", "chosen") if turned else ("chosen", "rejected"), ["second" if turned else "first"]
            first, second = (Candidate(_text(line[name]), name=f"{number}/{name}") for name in names)
            labels.append([None if one is None else NAMES[one] for one in given])
            reference = _text(line.get("reference") or "")
            questions.append(Question("pairwise", str(number), _text(line["prompt"]), (first, second), reference=reference))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: a pair has prompt, chosen and rejected, or prompt, first, second and labels (first, "
                f"second, tie or null, by rater); {error!r}"
            ) from error
    if len({len(of) for of in labels}) > 1:
        raise ValueError(f"{path}: every pair needs a label, or null, of each rater; numbers of labels differ")
    if not labels:
        raise ValueError(f"{path} has no pairs")
    return questions, labels


def _text(value: Any) -> str:
    """A string, or the contents of a conversation's messages; what no request or table can hold is replaced."""
    return well_formed(value if isinstance(value, str) else "\n".join(str(message["content"]) for message in value))
