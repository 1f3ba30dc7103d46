"""A judge that is a small local model: it answers by the probabilities of its options, in one pass and without sampling.

The prompt ends where the option's token comes next. With l its log-probabilities of the options for the first and the second
candidate, as shown,

    s = l(first) - l(second),  scores: scale * (sigmoid(s), 1 - sigmoid(s))

A match averages both orders (stages/judging/orders.py): with s_12 as asked and s_21 = -s with the candidates swapped, the first
wins if sigmoid(s_12) + sigmoid(s_21) > 1, so if s_12 + s_21 > 0, whatever is added to s for a position. A pointwise question's
score is the probability of the first option ("yes") against the second, scale * sigmoid(r), or with `logits` r = l(yes) - l(no)
itself, which is linear in the last hidden state: a reward model's scalar. An item of a checklist is met if r >= 0. A judgment
from log-odds that are no finite numbers is nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stages.agent.chat import Chat
from stages.agent.policy import Policy
from stages.judging.contract import Cost, Judgment, Question, Rubric, Status, digest, swapped
from stages.judging.replies import shown
from stages.judging.settings import LocalParams

if TYPE_CHECKING:
    from torch import Tensor


def prompt(question: Question, options: Sequence[str], item: str = "") -> str:
    """What the local judge reads: short, since it is asked for one token. `item`: what is asked of a single candidate, a
    checklist's item or the criteria; principles take its place."""
    parts, principles = [question.prompt], "; ".join(question.rubric.principles)
    if question.reference:
        parts.append(f"reference: {question.reference}")
    if question.kind == "pairwise":
        parts += [f"{option}: {shown(one)}" for option, one in zip(options, question.candidates, strict=True)]
        parts.append(f"{principles or 'better'}: {options[0]} or {options[1]}?")
    else:
        parts += [shown(question.candidates[0]), f"{principles or item}: {options[0]} or {options[1]}?"]
    return "\n".join(parts)


class LocalJudge:
    """See the module. Raises ValueError if an option is not one token after the prompt, or both are the same."""

    name = "local"

    def __init__(self, policy: Policy, params: LocalParams, max_length: int, logits: bool = False) -> None:
        self.model, self.params, self.max_length, self.logits = policy.model, params, max_length, logits
        self.chat = Chat(policy.tokenizer)
        tokens = [self.chat.tokens_of(option) for option in params.options]
        if any(len(one) != 1 for one in tokens) or tokens[0] == tokens[1]:
            raise ValueError(
                f"rl.judge.local.options {params.options} must be two different single tokens of the judge's model, and they "
                f"are {tokens}; choose others"
            )
        self.option_tokens = [one[0] for one in tokens]
        """Token ids of the two options."""
        self.version = digest([policy.hash, params.options, max_length, logits])[:16]
        self.sent = 0

    def keep(self) -> None:
        """Failures are the model's, and final."""

    def close(self) -> None:
        """Holds nothing."""

    def prompts(self, question: Question) -> list[list[int]]:
        """Tokens of what the model reads for a question, a prompt for each item of a checklist, else one; of a prompt that is too
        long its end. Models are fitted on these same prompts."""
        texts = (prompt(question, self.params.options, item) for item in _items(question))
        return [self.chat.prompt_tokens(text)[-self.max_length :] for text in texts]

    def margins(self, questions: Sequence[Question]) -> list[tuple[float, float]]:
        """(s_12, s_21) of pairwise questions: for the first candidate, as asked and swapped. A pass per order."""
        found = self._differences([self.prompts(one)[0] for question in questions for one in (question, swapped(question))])
        return [(one, -other) for one, other in zip(found[::2], found[1::2], strict=True)]

    def judge(self, questions: Sequence[Question]) -> list[Judgment]:
        """See `Judge.judge`. A prompt that was read for an earlier one of the questions costs nothing."""
        rows = [self.prompts(question) for question in questions]
        differences = iter(self._differences([row for found in rows for row in found]))
        seen: set[tuple[int, ...]] = set()
        made = []
        for question, found in zip(questions, rows, strict=True):
            fresh = {tuple(row) for row in found} - seen
            seen |= fresh
            made.append(self._judgment(question, [next(differences) for _ in found], Cost(calls=len(fresh))))
        return made

    def _judgment(self, question: Question, differences: Sequence[float], cost: Cost) -> Judgment:
        """What follows from the log-odds of the options after each of the question's prompts."""
        if question.kind == "pairwise":
            return replace(self.compared(question.rubric, differences[0]), cost=cost)
        if not all(map(math.isfinite, differences)):
            return _nonsense(differences, cost)
        if question.kind == "checklist":
            return Judgment(tuple(float(one >= 0) for one in differences), cost=cost)
        score = differences[0] if self.logits else question.rubric.scale * _sigmoid(differences[0])
        return Judgment((score,), cost=cost)

    @staticmethod
    def compared(rubric: Rubric, margin: float) -> Judgment:
        """The judgment of a pair in one order, from the log-odds of the first as shown."""
        if not math.isfinite(margin):
            return _nonsense([margin], Cost(calls=1))
        share = _sigmoid(margin)
        return Judgment((rubric.scale * share, rubric.scale * (1 - share)), f"log-odds {margin:.4g}", cost=Cost(calls=1))

    def _differences(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """l(first option) - l(second option) after each row of tokens. Equal rows are computed once, and with `batch` 1 each row
        alone, so that what is asked beside it does not change a bit of it."""
        import torch

        unique = list(dict.fromkeys(map(tuple, rows)))
        found: list[float] = []
        for start in range(0, len(unique), self.params.batch):
            with torch.no_grad():
                found += self.log_odds(unique[start : start + self.params.batch]).tolist()
        self.sent += len(unique)
        known = dict(zip(unique, found, strict=True))
        return [known[tuple(row)] for row in rows]

    def log_odds(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """l(first option) - l(second option) [B] float32 after each row of tokens, padded on the right; with gradient."""
        import torch

        from stages.engine.head import logits_of

        device, width = next(self.model.parameters()).device, max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        hidden: Any = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = logits_of(self.model, hidden[torch.arange(len(rows), device=device), last]).float()
        return logits[:, self.option_tokens[0]] - logits[:, self.option_tokens[1]]


def _items(question: Question) -> tuple[str, ...]:
    """What single questions ask for, a prompt each; "" for a comparison."""
    if question.kind == "pairwise":
        return ("",)
    return question.rubric.items if question.kind == "checklist" else (", ".join(question.rubric.answer),)


def _nonsense(differences: Sequence[float], cost: Cost) -> Judgment:
    found = ", ".join(f"{one:.4g}" for one in differences)
    return Judgment(reason=f"log-odds {found}: is the model broken?", status=Status.NONSENSE, cost=cost)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
