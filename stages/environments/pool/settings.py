"""Settings of a pool's members. Light to import."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from stages.runtime.validation import Checked, Count, NonNegative, Positive, Share, watched

SHIPPED = "data/base"
NAME = r"^[a-z][a-z0-9_.-]*$"


class Retriever(Checked):
    """BM25 over the part of the encyclopaedia that the member knows."""

    relations: list[str] | None = None
    """Facts that it knows, by relation; null: all relations."""
    reach: Share = 1.0
    """Share of these facts that it has, drawn per fact."""
    wrong: Share = 0.0
    """Share of its facts that it states wrongly, with another name; drawn per fact, always the same."""
    results: Annotated[int, Field(ge=1, le=10)] = 1
    """Pages of a reply."""


class _Speaker(Checked):
    prompt: str = "{question}"
    """The message to it; {question} is what the policy asks."""

    @field_validator("prompt")
    @classmethod
    def _asks(cls, prompt: str) -> str:
        if "{question}" not in prompt:
            raise ValueError("must contain {question}, where the policy's question goes")
        return prompt


class LocalModel(_Speaker):
    """A model in a folder, played greedily in the environment's process."""

    folder: str
    """data/base, or a save_pretrained folder below data/raw, where DVC tracks changes; copy a merged model there."""

    @field_validator("folder")
    @classmethod
    def _tracked(cls, folder: str) -> str:
        if folder != SHIPPED and not watched(folder):
            raise ValueError(f"is {folder}; use {SHIPPED}, or copy the model below data/raw, where DVC tracks changes")
        return folder


class Server(_Speaker):
    """A model behind an OpenAI-compatible server, such as `python -m stages.serving`."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Its address. The key is read from the environment variable OPENAI_API_KEY, if it is set."""
    model: Annotated[str, Field(min_length=1)]
    """The model's name at the server."""
    timeout_s: Positive = 60.0
    """Per attempt."""
    attempts: Count = 4
    """Attempts per question; a server that answers none of them stops the stage, which then resumes."""
    cache: str = "data/replies"
    """Folder of all replies, relative to the repository: a run whose questions are in it needs no server."""

    @field_validator("base_url")
    @classmethod
    def _address(cls, address: str) -> str:
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"is {address}; begin with http:// or https://")
        return address


class Member(Checked):
    """A tool of the pool: a retriever unless `model` or `server` is given."""

    name: Annotated[str, Field(pattern=NAME)]
    """What the policy calls it."""
    about: str = ""
    """Its descriptor in the prompt. "": what a retriever knows."""
    price: NonNegative
    """Price of a million tokens of its replies; a call costs price times tokens, in millionths of the currency."""
    new: bool = False
    """Only in test tasks: a member that no training task has."""
    retriever: Retriever | None = None
    model: LocalModel | None = None
    server: Server | None = None

    @model_validator(mode="after")
    def _one_backend(self) -> Member:
        if sum(one is not None for one in (self.retriever, self.model, self.server)) > 1:
            raise ValueError(f"member {self.name} has several of retriever, model and server; give one")
        if not self.about and (self.model is not None or self.server is not None):
            raise ValueError(f"member {self.name}: about is empty; describe the model, the policy chooses by it")
        return self

    @property
    def knows(self) -> Retriever | None:
        """The retriever, also where it is the default; None for a model or a server."""
        return None if self.model is not None or self.server is not None else self.retriever or Retriever()

    @property
    def descriptor(self) -> str:
        """What the prompt says about it."""
        if self.about or self.knows is None:
            return self.about
        return "all relations" if self.knows.relations is None else ", ".join(self.knows.relations)


def check_names(pool: list[Member]) -> list[Member]:
    """Raise ValueError for two members of one name, and for a pool without a member in training."""
    names = [member.name for member in pool]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"names {twice} twice; the policy chooses members by name")
    if all(member.new for member in pool):
        raise ValueError("has only new members, so training tasks have none; set new: false for one")
    return pool
