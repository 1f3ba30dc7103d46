"""A judge that is a small local model: it answers by the probabilities of its options, in one pass and without sampling.

The prompt ends where the option's token comes next. With l its log-probabilities of the options for the first and the second
candidate,

    s_12 = l(first) - l(second) as asked,  s_21 = l(second) - l(first) with the candidates swapped,
    p = sigmoid((s_12 + s_21) / 2)

is the probability that the first is better, free of an additive bias for a position. Scores are scale * (p, 1 - p). A pointwise
question's or checklist item's score is the probability of the first option ("yes") against the second, scale * sigmoid(r), or
with `logits` r = l(yes) - l(no) itself, which is linear in the last hidden state: a reward model's scalar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stages.agent.chat import Chat
from stages.agent.policy import Policy
from stages.judging.contract import Cost, Judgment, Question, Rubric, digest, swapped
from stages.judging.replies import shown
from stages.judging.settings import LocalParams

if TYPE_CHECKING:
    from torch import Tensor


def prompt(question: Question, options: Sequence[str], item: str = "") -> str:
    """What the local judge reads: short, since it is asked for one token. `item`: of a checklist."""
    parts, principles = [question.prompt], "; ".join(question.rubric.principles)
    if question.reference:
        parts.append(f"reference: {question.reference}")
    if question.kind == "pairwise":
        parts += [f"{option}: {shown(one)}" for option, one in zip(options, question.candidates, strict=True)]
        parts.append(f"{principles or 'better'}: {options[0]} or {options[1]}?")
    else:
        parts += [shown(question.candidates[0]), f"{principles or item or 'good'}: {options[0]} or {options[1]}?"]
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
        self.version = digest([policy.hash, params.options])[:16]

    def close(self) -> None:
        """Holds nothing."""

    def margins(self, questions: Sequence[Question]) -> list[tuple[float, float]]:
        """(s_12, s_21) of pairwise questions: for the first candidate, as asked and swapped. A pass per order."""
        asked = self._differences([prompt(question, self.params.options) for question in questions])
        turned = self._differences([prompt(swapped(question), self.params.options) for question in questions])
        return [(one, -other) for one, other in zip(asked, turned, strict=True)]

    def judge(self, questions: Sequence[Question]) -> list[Judgment]:
        pairs = [question for question in questions if question.kind == "pairwise"]
        compared = iter(self.margins(pairs))
        items = [(place, item) for place, question in enumerate(questions) for item in _items(question)]
        single = self._differences([prompt(questions[place], self.params.options, item) for place, item in items])
        logits: dict[int, list[float]] = {}
        for (place, _), difference in zip(items, single, strict=True):
            logits.setdefault(place, []).append(difference)
        made = []
        for place, question in enumerate(questions):
            if question.kind == "pairwise":
                made.append(self.compared(question.rubric, *next(compared)))
            elif question.kind == "pointwise":
                made.append(Judgment((self._scored(question.rubric, logits[place][0]),), cost=Cost(calls=1)))
            else:
                cost = Cost(calls=len(logits[place]))
                made.append(Judgment(tuple(float(logit >= 0) for logit in logits[place]), cost=cost))
        return made

    def _scored(self, rubric: Rubric, logit: float) -> float:
        return logit if self.logits else rubric.scale * _sigmoid(logit)

    @staticmethod
    def compared(rubric: Rubric, asked: float, turned: float) -> Judgment:
        """The judgment that follows from s_12 and s_21."""
        share = _sigmoid((asked + turned) / 2)
        reason = f"log-odds {asked:.4g} as asked, {turned:.4g} swapped"
        return Judgment((rubric.scale * share, rubric.scale * (1 - share)), reason, cost=Cost(calls=2))

    def _differences(self, prompts: Sequence[str]) -> list[float]:
        """l(first option) - l(second option) after each prompt; in blocks of equal order, padded on the right."""
        import torch

        encoded = [self.chat.prompt_tokens(text)[-self.max_length :] for text in prompts]
        found: list[float] = []
        for start in range(0, len(encoded), self.params.batch):
            with torch.no_grad():
                found += self.log_odds(encoded[start : start + self.params.batch]).tolist()
        return found

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
    """The single questions that a question consists of, besides a comparison."""
    if question.kind == "pairwise":
        return ()
    return question.rubric.items if question.kind == "checklist" else (", ".join(question.rubric.answer),)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
