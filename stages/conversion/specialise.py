"""S5: specialists. Fine-tuning on a cluster's calls, with the large model's distribution where tokenizers agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.agent.chat import Chat
from stages.agent.policy import Policy
from stages.conversion.settings import Specialise
from stages.engine.engine import Sampling, Turn
from stages.engine.local_engine import make_engine
from stages.records.episode import Episode
from stages.training.common.documents import Documents, encode, epoch_batches

SLOTS = 32


@dataclass(frozen=True)
class Answer:
    """A model's greedy answer. `confidence`: mean probability of its tokens."""

    text: str
    confidence: float


def distillation_loss(student: Tensor, teacher: Tensor | None, targets: Tensor, weight: float, temperature: float) -> Tensor:
    """(1 - w) mean -log p_S(y) + w tau^2 mean KL(p_T^tau || p_S^tau), over N tokens.

    student, teacher: logits [N, V]; targets [N]. Without a teacher, w is 0 (distillation on its answers).
    """
    answers = torch.nn.functional.cross_entropy(student, targets)
    if teacher is None or not weight:
        return answers
    ours, theirs = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    return (1 - weight) * answers + weight * temperature**2 * divergence


def call_messages(call: dict[str, Any]) -> list[dict[str, str]]:
    return [*call["prompt"], {"role": "assistant", "content": call["response"]}]


def documents_of(chat: Chat, calls: Sequence[dict[str, Any]], max_length: int) -> Documents:
    """The calls as training documents; only the answer of each is trained. Calls over `max_length` are left out."""
    episodes = [
        Episode(
            *(f"{call['trace']}/{call['call']}", call["trace"], "", call["trace"], 0, "", "", 0.0, 1.0, 0),
            messages=call_messages(call),
            inherited=len(call["prompt"]) // 2,
        )
        for call in calls
    ]
    fitting = [one for one in episodes if len(chat.encode_demonstration(one.messages).token_ids) <= max_length]
    return encode(chat, fitting, max_length)


def _answer_logits(model: Any, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Logits [N, V] before the masked tokens [b, t], in float32."""
    logits = model(input_ids=token_ids, use_cache=False).logits
    return logits[:, :-1][mask[:, 1:]].float()


def train(
    student: Policy, teacher: Policy | None, calls: Sequence[dict[str, Any]], settings: Specialise, max_length: int, *key: object
) -> float:
    """Train the student in place on the calls; returns the last epoch's mean loss. `key`: of the order of the documents."""
    documents = documents_of(Chat(student.tokenizer), calls, max_length)
    if teacher is not None and teacher.tokenizer.get_vocab() != student.tokenizer.get_vocab():
        teacher = None
    model = student.model.train()
    if settings.lora_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules="all-linear")
        )
    optimiser = torch.optim.AdamW(
        [one for one in model.parameters() if one.requires_grad], settings.learning_rate, weight_decay=0.0
    )
    losses: list[float] = []
    for epoch in range(settings.epochs):
        losses = []
        for rows in epoch_batches(documents, settings.batch_tokens, *key, epoch):
            token_ids, mask = documents.take(rows, student.model.device)
            targets = token_ids[:, 1:][mask[:, 1:]]
            with torch.no_grad():
                theirs = None if teacher is None else _answer_logits(teacher.model.eval(), token_ids, mask)
            loss = distillation_loss(
                _answer_logits(model, token_ids, mask), theirs, targets, settings.kd_weight, settings.kd_temperature
            )
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            losses.append(float(loss.detach()))
    if settings.lora_rank:
        student.model.load_state_dict(model.merge_and_unload().state_dict())
    student.model.eval()
    return float(np.mean(losses))


def answer_of(chat: Chat, turn: Turn) -> Answer:
    """The answer in a turn."""
    confidence = float(np.exp(np.array(turn.logprobs)).mean()) if turn.logprobs else 0.0
    return Answer(chat.action_text(turn.token_ids), confidence)


def answers(policy: Policy, calls: Sequence[dict[str, Any]], max_length: int, max_tokens: int) -> list[Answer]:
    """The model's greedy answers to the calls' prompts, in order; "" with confidence 0 where there is no room."""
    chat = Chat(policy.tokenizer)
    engine = make_engine(policy.model, [chat.end_of_turn], SLOTS, max_length)
    found: dict[int, Answer] = {}
    places: dict[int, int] = {}
    for place, call in enumerate(calls):
        token_ids = chat.encode(call["prompt"]).token_ids
        if len(token_ids) >= max_length:
            found[place] = Answer("", 0.0)
            continue
        session = engine.open(token_ids)
        places[session] = place
        engine.request(session, place, Sampling(temperature=0.0, max_tokens=max_tokens))
    while len(found) < len(calls):
        for turn in engine.advance():
            found[places[turn.session]] = answer_of(chat, turn)
            engine.close(turn.session)
    return [found[place] for place in range(len(calls))]


def parameters(policy: Policy) -> int:
    return sum(one.numel() for one in policy.model.parameters())


def save(policy: Policy, folder: Path) -> None:
    from stages.agent.policy import save_policy

    save_policy(policy.model, policy.tokenizer, folder)
