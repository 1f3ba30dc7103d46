"""A generative verifier: a model that reads question, reference and answer and says in one token whether they agree."""

from __future__ import annotations

from collections.abc import Sequence

from stages.agent.chat import Chat
from stages.agent.policy import Policy
from stages.judging.contract import digest


def verifier_prompt(question: str, reference: str, answer: str, labels: Sequence[str]) -> str:
    """What the verifier reads. Of the episode it sees the answer alone, never what the environment returned."""
    return f"{question}\nreference: {reference}\nanswer: {answer}\nsame: {labels[0]} or {labels[1]}?"


class GenerativeVerifier:
    """labels: what the model answers for right and for wrong. Raises ValueError if they are not two different single tokens."""

    def __init__(self, policy: Policy, labels: Sequence[str], max_length: int) -> None:
        self.model, self.labels, self.max_length = policy.model, tuple(labels), max_length
        self.chat = Chat(policy.tokenizer)
        tokens = [self.chat.tokens_of(label) for label in labels]
        if any(len(one) != 1 for one in tokens) or tokens[0] == tokens[1]:
            raise ValueError(
                f"rl.verifier.labels {list(labels)} must be two different single tokens of the verifier's model, and they are "
                f"{tokens}; choose others"
            )
        self.label_tokens = [one[0] for one in tokens]
        self.version = digest([policy.hash, list(labels)])[:16]

    def prompt_tokens(self, question: str, reference: str, answer: str) -> list[int]:
        """Tokens of the prompt, the end of it if it is too long."""
        return self.chat.prompt_tokens(verifier_prompt(question, reference, answer, self.labels))[-self.max_length :]

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
        """(log p1, log p0) after each prompt, by the softmax over the whole vocabulary. Each prompt is computed alone, so that
        its probabilities do not depend on the others."""
        import torch

        from stages.agent.logprobs import hidden_states
        from stages.engine.head import logits_of

        device, found = next(self.model.parameters()).device, []
        with torch.no_grad():
            for prompt in prompts:
                hidden = hidden_states(self.model, torch.tensor([list(prompt)], device=device))[0, -1]
                logs = logits_of(self.model, hidden).float().log_softmax(-1)
                found.append((float(logs[self.label_tokens[0]]), float(logs[self.label_tokens[1]])))
        return found
