"""Opens a policy behind the back end of `resources.engine`, for rollout, annotate and evaluate.

rl always uses the torch engine, which reads the weights in place, since they change with every step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.agent.chat import Chat
from stages.agent.plain_text import plain_text
from stages.engine.engine import Engine, EngineError, EngineSettings


@dataclass(frozen=True)
class Player:
    """A policy ready to generate. `policy`: the loaded model, if the engine is the torch engine."""

    engine: Engine
    chat: Chat
    policy_hash: str
    policy: Any = None

    def close(self) -> None:
        """Release the resources of an outside back end."""
        backend = getattr(self.engine, "backend", None)
        if backend is not None:
            backend.close()


def served_name(folder: Path) -> str:
    """The model name to request from a server: its folder relative to the repository's root (data/models/sft)."""
    path = Path(os.path.relpath(folder))
    return folder.as_posix() if ".." in path.parts else path.as_posix()


def open_player(folder: Path, settings: EngineSettings, *, text: bool = False, plain: bool = False) -> Player:
    """Open the policy in `folder` behind the back end of `settings`.

    text: whether the caller accepts text without tokens from a server (`resources.engine.text`). plain: its conversations are
    plain text (stages/agent/plain_text.py). Raises PolicyError for an incomplete folder, EngineError for a back end that is not
    installed or lacks a required feature, ValueError for a tokenizer that can't write plain text.
    """
    from stages.agent.policy import check_folder, load_policy, load_tokenizer, policy_hash

    def make_chat(tokenizer: Any) -> Chat:
        return Chat(plain_text(tokenizer) if plain else tokenizer, settings.thinking)

    if settings.kind == "torch":
        from stages.engine.local_engine import make_engine

        policy = load_policy(folder, device=settings.device, precision=settings.precision)
        chat = make_chat(policy.tokenizer)
        engine = make_engine(policy.model, [chat.end_of_turn], settings.slots, settings.max_length)
        return Player(engine, chat, policy.hash, policy)
    from stages.engine.checked_backend import CheckedBackend
    from stages.engine.completion_engine import Backend, CompletionEngine

    check_folder(folder)
    chat = make_chat(load_tokenizer(folder))
    backend: Backend
    as_text = settings.kind == "openai" and settings.text
    if as_text and plain:
        raise EngineError(
            "evaluate.examples_as: text needs the tokens of a conversation, which resources.engine.text: true does without; set "
            "text to false, or examples_as to chat"
        )
    if as_text and not text:
        raise EngineError(
            "resources.engine.text is for evaluate alone: this stage records episodes with tokens and log-probabilities. Set it "
            "to false and use a server that returns them, or set resources.engine.kind to torch"
        )
    if settings.kind == "vllm":
        from stages.engine.vllm_engine import VllmBackend

        backend = VllmBackend(folder, chat.end_of_turn, settings)
    else:
        from stages.engine.openai_engine import OpenAIBackend, make_client

        client = make_client(settings.base_url)
        options: dict[str, Any] = {"dialect": settings.dialect, "text": as_text, "requests": settings.requests}
        backend = OpenAIBackend(client, served_name(folder), chat.tokenizer, chat.end_of_turn, **options)
    if settings.check_turns and not as_text:

        def load() -> Any:
            return load_policy(folder, device=settings.device, precision=settings.precision).model

        backend = CheckedBackend(backend, load, settings.check_turns, settings.precision)
    return Player(CompletionEngine(backend, settings.max_length), chat, policy_hash(folder))
