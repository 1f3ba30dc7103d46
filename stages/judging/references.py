"""Verifiable rewards from references (Jiang et al., arXiv 2601.18533): key words in order, and style predicates. Pure functions.

    content r_c = 1/M sum_m max_i LCS(occ(K_mi, z_i), occ(K_mi, y)) / max(|occ(K_mi, z_i)|, |occ(K_mi, y)|)
    style   r_s = sum_n w_n [c_n(y)] / sum_n w_n
    reward  r = a r_c + b r_s

occ(K, t) lists the occurrences of the key words K in a text t from left to right, repetitions included; LCS is the length of the
longest common subsequence; z_i are references, y is the answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

from stages.environments.search.scoring import answer_bleu, common_length
from stages.records.reward_chain import RewardChain, Style
from stages.sandbox import Program, Sandbox, SandboxError, Tests

Content = Literal["lcs", "recall", "bleu", "none"]
_FUNCTION = re.compile(r"^def (\w+)\(", re.MULTILINE)


@lru_cache(maxsize=4096)
def _pattern(keywords: tuple[str, ...], compatible: bool, case_sensitive: bool) -> re.Pattern[str]:
    """Matches any key word between boundaries. Longer ones first, so that "risk" does not hide "risk management"; "+" and "#"
    belong to words ("c" does not occur in "c++"). compatible: in the given order, with plain word boundaries."""
    flags = 0 if case_sensitive else re.IGNORECASE
    if compatible:
        return re.compile(rf"\b(?:{'|'.join(map(re.escape, keywords))})\b", flags)
    ordered = sorted(set(keywords), key=lambda word: (-len(word), word))
    return re.compile(rf"(?<![\w+#])(?:{'|'.join(map(re.escape, ordered))})(?![\w+#])", flags)


def occurrences(keywords: Sequence[str], text: str, compatible: bool = False, case_sensitive: bool = False) -> list[str]:
    """Key words in `text`, left to right, not overlapping; in lower case unless case_sensitive. Empty without key words."""
    known = tuple(word for word in keywords if word)
    if not known:
        return []
    found = _pattern(known, compatible, case_sensitive).findall(text)
    return found if case_sensitive else [word.lower() for word in found]


def ordered_share(wanted: Sequence[str], found: Sequence[str]) -> float:
    """LCS / max of the lengths; 0 if both are empty."""
    longest = max(len(wanted), len(found))
    return common_length(wanted, found) / longest if longest else 0.0


def recall_share(wanted: Sequence[str], found: Sequence[str]) -> float:
    """Share of the different key words that occur; 0 if none is wanted."""
    return len({*wanted} & {*found}) / len({*wanted}) if wanted else 0.0


def content_reward(
    chain: RewardChain, answer: str, kind: Content = "lcs", compatible: bool = False, case_sensitive: bool = False
) -> float:
    """r_c in [0, 1]; 0 without key points. recall: coverage in place of order; bleu: the best BLEU of any reference.

    compatible: as the reference code, all occurrences are counted in the first reference, so that key words that only another
    reference has can't score.
    """
    if kind == "none":
        return 0.0
    if kind == "bleu":
        return max((answer_bleu(answer, reference) for reference in chain.references), default=0.0)
    share = ordered_share if kind == "lcs" else recall_share
    total = 0.0
    for point in chain.key_points:
        scores = []
        for number, keywords in enumerate(point):
            text = chain.references[0 if compatible else number]
            pair = (occurrences(keywords, one, compatible, case_sensitive) for one in (text, answer))
            scores.append(share(*pair))
        total += max(scores, default=0.0)
    return total / len(chain.key_points) if chain.key_points else 0.0


def style_reward(chain: RewardChain, answer: str, run: Callable[[Style, str], bool]) -> float:
    """r_s in [0, 1]; 0 without styles. `run` decides one demand."""
    total = sum(style.weight for style in chain.styles)
    return sum(style.weight for style in chain.styles if run(style, answer)) / total if total else 0.0


def keyword_share(chain: RewardChain, answer: str) -> float:
    """Share of the answer's words that belong to key words: near 1 for a bare list of them (stuffing); 0 for no words."""
    words = Counter(re.findall(r"\w+", answer.lower()))
    known = {
        part for point in chain.key_points for keywords in point for word in keywords for part in re.findall(r"\w+", word.lower())
    }
    return sum(count for word, count in words.items() if word in known) / words.total() if words else 0.0


def length_ratio(chain: RewardChain, answer: str) -> float:
    """rho = words of the answer / words of the first reference; 0 for an empty reference."""
    wanted = len(chain.references[0].split()) if chain.references else 0
    return len(answer.split()) / wanted if wanted else 0.0


def length_penalty(ratio: float) -> float:
    """0 for rho in [0.9, 1.2], else |rho - 1|."""
    return 0.0 if 0.9 <= ratio <= 1.2 else abs(ratio - 1)


class StyleChecks:
    """Decides demands on style. A predicate written by a model must be one function that returns a bool; it runs in `sandbox`,
    and fails the demand if it raises, returns anything else, or takes too long."""

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox
        self.failures = 0
        """Predicates that could not be decided."""

    def __call__(self, style: Style, answer: str) -> bool:
        if style.check is not None:
            try:
                return style.check(answer) is True
            except Exception:
                self.failures += 1
                return False
        names = _FUNCTION.findall(style.source)
        if len(names) != 1:
            self.failures += 1
            return False
        if self._sandbox is None:
            self._sandbox = Sandbox()
        tests = (f"assert isinstance({names[0]}({answer!r}), bool)", f"assert {names[0]}({answer!r})")
        try:
            outcome = self._sandbox.run(Program(style.source, names[0], ("text",)), Tests(tests))
        except SandboxError as error:
            raise RuntimeError(f"style predicates that a model wrote run only in the sandbox: {error}") from error
        verdicts = [result.verdict for result in outcome.results]
        decided = outcome.status == "ok" and verdicts[:1] == ["pass"]
        self.failures += not decided
        return decided and verdicts == ["pass", "pass"]

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()


_STOP = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "by",
        "for",
        "from",
        "has",
        "have",
        "he",
        "her",
        "his",
        "in",
        "is",
        "it",
        "its",
        "of",
        "on",
        "or",
        "she",
        "that",
        "the",
        "their",
        "they",
        "this",
        "to",
        "was",
        "were",
        "which",
        "with",
    ]
)
KEYWORDS = 6
"""Key words of a key point, at most."""


def extracted(references: Sequence[str]) -> RewardChain:
    """A chain from references alone, by rules of ours in place of the paper's language model: a key point per clause of the first
    reference, whose key words are its words but common ones; the same words for the other references; and the first reference's
    length (0.8 to 1.2 of its words), number of lines, and first word as styles. Raises ValueError without references."""
    if not references:
        raise ValueError("a reward chain needs at least one reference")
    first = references[0]
    clauses = [re.findall(r"[\w'-]+", clause) for clause in re.split(r"[.;,:!?\n]+", first)]
    points = []
    for clause in clauses:
        if words := tuple(dict.fromkeys(word for word in clause if word.lower() not in _STOP))[:KEYWORDS]:
            points.append((words,) * len(references))
    if not points and (words := tuple(re.findall(r"\w+", first))[:KEYWORDS]):
        points.append((words,) * len(references))
    count, lines, opening = len(first.split()), first.count("\n"), (first.lower().split() or [""])[0]
    styles = (
        Style("length", 0.4, lambda text: 0.8 * count <= len(text.split()) <= 1.2 * count),
        Style("lines", 0.3, lambda text: text.count("\n") == lines),
        Style("opening", 0.3, lambda text: (text.lower().split() or [""])[0] == opening),
    )
    return RewardChain(tuple(references), tuple(points), styles)
