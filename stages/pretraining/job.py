"""Trains the base model: next-token loss with full weight on answers and little on their context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stages.agent.chat import Chat as ChatFormat
from stages.algorithms.batch import LossTerms
from stages.pretraining.corpus import Chat
from stages.pretraining.settings import Settings
from stages.records.episode import Owner
from stages.seeding import seed_torch
from stages.training.common.loop import Job, Learner, Sums, Update
from stages.training.common.optimiser import make_optimiser, warmup_stable_decay

if TYPE_CHECKING:
    from stages.training.common.processes import Processes

MICRO_BATCH = 8
SETTLED = 25
"""Steps over which a phase's accuracy is averaged (see `Phase.until`)."""


@dataclass(frozen=True)
class Sample:
    """Token ids, and each token's weight in the loss."""

    family: str
    token_ids: list[int]
    weights: list[float]


def encode(chat: ChatFormat, sample: Chat, max_length: int, context_weight: float = 0.0) -> Sample:
    """Weight 1 for answers, `context_weight` for everything else, random actions included. Truncated to `max_length`."""
    messages = [{"role": role, "content": text} for role, text in sample.messages]
    encoded = chat.encode_demonstration(messages if messages[-1]["role"] == "assistant" else messages[:-1])
    answer = 1.0 if sample.family != "transcript" else context_weight
    weights = [answer if owner == Owner.POLICY else context_weight for owner in encoded.owner]
    if sample.answers is not None:
        replies = [text for role, text in sample.messages if role == "assistant"]
        is_answer = iter(sample.answers)
        for (start, end), text in zip(encoded.spans, replies, strict=True):
            weights[start:end] = [context_weight] * (end - start)
            for word in text.split(" "):
                bare, whole = (len(chat.assistant_tokens(part)) - 1 for part in (word.rstrip(","), word))
                if next(is_answer):
                    weights[start : start + bare] = [answer] * bare
                start += whole
    return Sample(sample.family, encoded.token_ids[:max_length], weights[:max_length])


def build_model(settings: Settings, vocabulary: int) -> Any:
    """A Llama with tied embeddings, initialised from the seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    seed_torch("pretrain", settings.seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.max_length,
        tie_word_embeddings=True,
        initializer_range=0.02,
        pad_token_id=0,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def collate(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Right-padded token ids [B, T] and weights [B, T] (0 on padding)."""
    length = max(len(sample.token_ids) for sample in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    weights = torch.zeros(len(samples), length)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        weights[row, : len(sample.weights)] = torch.tensor(sample.weights)
    return ids, weights


def predictions(model: Any, ids: Tensor, keep: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits [n, V] and targets [n] at the positions after which `keep` [B, T] is set.

    With `tokens` ([v], sorted), logits are [n, v] over these alone and targets index them.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    chosen = keep[:, 1:]
    hidden, targets = hidden[chosen], ids[:, 1:][chosen]
    if tokens is None:
        return model.lm_head(hidden), targets
    return hidden @ model.lm_head.weight[tokens].T, torch.searchsorted(tokens, targets)


class PretrainJob(Job):
    """See stages.training.common.loop.Job. A step trains on the corpus batch at `place`, sorted by length; `place` then moves to
    the next batch, or to the next phase's first batch if a phase ends early. The learning rate is a function of `place`."""

    def __init__(self, samples: Sequence[Sample], settings: Settings, vocabulary: int, processes: Processes) -> None:
        self.samples, self.settings = samples, settings
        self.place = 0
        self.recent: list[float] = []
        """Answer accuracy of the phase's most recent steps."""
        self.model = build_model(settings, vocabulary)
        self.trained_model, self.processes = processes.replica(self.model), processes
        optimiser = make_optimiser(processes.place(self.model), settings.learning_rate, settings.weight_decay, betas=(0.9, 0.98))
        rate = warmup_stable_decay(settings.learning_rate, settings.steps, settings.warmup, settings.decay)
        learner = Learner(self.model, optimiser, lambda update: rate(self.place), 1.0, processes)
        self.learners: Mapping[str, Learner] = {"policy": learner}
        self.predicted = self._predicted_tokens(processes.device)

    def _predicted_tokens(self, device: torch.device) -> dict[int, Tensor | None]:
        """Phase number -> tokens that its softmax normalises over; None for all."""
        tokens: dict[int, Tensor | None] = {}
        start = 0
        for number, phase in enumerate(self.settings.phases):
            end = start + phase.steps * self.settings.batch
            if phase.softmax == "all":
                tokens[number] = None
            else:
                targets = {
                    token
                    for sample in self.samples[start:end]
                    for token, weight in zip(sample.token_ids[1:], sample.weights[1:], strict=True)
                    if weight > 0
                }
                tokens[number] = torch.tensor(sorted(targets), device=device)
            start = end
        return tokens

    def updates(self, step: int) -> Iterator[Update]:
        size = self.settings.batch
        batch = sorted(self.samples[self.place * size : (self.place + 1) * size], key=lambda item: -len(item.token_ids))
        total = sum(sum(sample.weights[1:]) for sample in batch)
        device = self.processes.device
        tokens = self.predicted[self.settings.phase_number(self.place)]

        def loss(micro: Sequence[Sample]) -> Iterator[LossTerms]:
            ids, weights = (tensor.to(device) for tensor in collate(micro))
            weights[:, 0] = 0.0
            logits, targets = predictions(self.model, ids, weights > 0, tokens)
            picked = weights[weights > 0]
            losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
            share = (losses * picked).sum() / total
            sums: dict[str, Any] = {"loss": share.detach()}
            families = [sample.family for sample in micro]
            rows, right = (weights > 0).nonzero()[:, 0], logits.argmax(-1) == targets
            for family in sorted(set(families)):
                asked = torch.tensor([name == family for name in families], device=device)[rows] & (picked == 1.0)
                sums |= {f"right/{family}": right[asked].sum(), f"answers/{family}": asked.sum()}
            yield LossTerms(share, sums)

        yield Update("policy", [batch[start : start + MICRO_BATCH] for start in range(0, len(batch), MICRO_BATCH)], loss)

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        policy = sums["policy"]
        right = {name.removeprefix("right/"): value for name, value in policy.items() if name.startswith("right/")}
        answers = {family: policy[f"answers/{family}"] for family in right}
        accuracy = sum(right.values()) / max(sum(answers.values()), 1.0)
        number = self.settings.phase_number(self.place)
        row = {"loss": policy["loss"], "answer_accuracy": accuracy, "learning_rate": self.learners["policy"].learning_rate}
        row |= {"phase": float(number + 1)}
        row |= {f"accuracy/{family}": right[family] / answers[family] for family in sorted(right) if answers[family]}
        self._advance(number, accuracy)
        return row

    def _advance(self, number: int, accuracy: float) -> None:
        """Move to the next batch, or to the next phase if the mean accuracy exceeds the phase's `until`."""
        self.recent = [*self.recent, accuracy][-SETTLED:]
        self.place += 1
        end = self.settings.phase_end(number)
        if len(self.recent) == SETTLED and sum(self.recent) / SETTLED > self.settings.phases[number].until:
            self.place = end
        if self.place == end:
            self.recent = []

    def finished(self) -> bool:
        return self.place >= self.settings.steps

    def close(self) -> Any:
        """The trained model, whole in every process."""
        self.processes.refresh(self.trained_model, self.model)
        return self.trained_model

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "recent": self.recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.recent = state["place"], state["recent"]


def answer_accuracy(model: Any, samples: Sequence[Sample]) -> dict[str, float]:
    """By family, the share of answers whose tokens the model all predicts correctly (argmax, given the preceding text)."""
    right: dict[str, list[bool]] = {}
    with torch.inference_mode():
        for sample in samples:
            ids, weights = collate([sample])
            keep = weights == 1.0
            logits, targets = predictions(model.cpu(), ids, keep)
            positions = keep[0, 1:].nonzero().flatten().tolist()
            hits = (logits.argmax(-1) == targets).tolist()
            runs: list[bool] = []
            for index, position in enumerate(positions):
                if index and position == positions[index - 1] + 1:
                    runs[-1] = runs[-1] and hits[index]
                else:
                    runs.append(hits[index])
            right.setdefault(sample.family, []).extend(runs)
    return {family: round(sum(hits) / len(hits), 4) for family, hits in sorted(right.items())}
