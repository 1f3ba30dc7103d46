"""A model that chooses between two texts by the probabilities of its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.agent.chat import Chat
from stages.agent.policy import Policy


def choice_prompt(question: str, first: str, second: str, options: Sequence[str]) -> str:
    """What the model reads; its next token is its choice."""
    return f"{question}\n{options[0]}: {first}\n{options[1]}: {second}\n{options[0]} or {options[1]}?"


class Chooser:
    """Raises ValueError if the options are not two different single tokens. `section`: of the setting, for messages."""

    def __init__(self, policy: Policy, question: str, options: Sequence[str], max_length: int, section: str) -> None:
        self.model, self.question, self.options, self.max_length = policy.model, question, options, max_length
        self.chat = Chat(policy.tokenizer)
        tokens = [self.chat.tokens_of(option) for option in options]
        if any(len(one) != 1 for one in tokens) or tokens[0] == tokens[1]:
            raise ValueError(
                f"{section}.options {list(options)} must be two different single tokens of the model, and they are {tokens}; "
                f"choose others"
            )
        self.option_tokens = [one[0] for one in tokens]

    def prompt_tokens(self, first: str, second: str) -> list[int]:
        return self.chat.prompt_tokens(choice_prompt(self.question, first, second, self.options))[-self.max_length :]

    def probabilities(self, pairs: Sequence[tuple[str, str]], batch: int = 32) -> list[tuple[float, float]]:
        """(first, second option) after each pair's prompt, by the softmax over the vocabulary; the rest is neither."""
        import torch

        found: list[tuple[float, float]] = []
        rows = [self.prompt_tokens(*pair) for pair in pairs]
        for start in range(0, len(rows), batch):
            with torch.no_grad():
                shares = self.logits(rows[start : start + batch]).softmax(-1)[:, self.option_tokens]
            found += [(float(first), float(second)) for first, second in shares.tolist()]
        return found

    def logits(self, rows: Sequence[Sequence[int]]) -> Any:
        """[B, V] float32 after each row of tokens, padded on the right; with gradient."""
        import torch

        from stages.engine.head import logits_of

        device, width = next(self.model.parameters()).device, max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        hidden: Any = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return logits_of(self.model, hidden[torch.arange(len(rows), device=device), last]).float()
