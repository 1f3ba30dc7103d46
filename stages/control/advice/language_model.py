"""A language model from a folder as the decision: it chooses among the goals by the probabilities of their texts.

Requests and answers are recorded by hashes of the model's files and the prompt, so that a run can be repeated from the record
without the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stages.control.advice.settings import Decision
from stages.control.advice.world import GOALS
from stages.records.sections import params_hash
from stages.runtime.files import atomic_text
from stages.runtime.lineage import dvc_hash
from stages.runtime.validation import ParamsError
from stages.seeding import stream


class LanguageModel:
    """See the module. `calls`: requests that the model answered. The model is loaded when it is first asked.

    Raises ParamsError for a folder without a model, unless the record answers in its place, or a record that is not one."""

    def __init__(self, settings: Decision) -> None:
        self.settings, self.calls = settings, 0
        self.folder, self.file = Path(settings.model), None if settings.records is None else Path(settings.records)
        self.answers: dict[str, list[float]] = {}
        """By request: a hash of the model's files and the prompt."""
        self.models: dict[str, str] = {}
        """By request: the hash of the model that answered."""
        self._loaded: tuple[Any, Any] | None = None
        if self.file is not None and self.file.exists():
            self._read(self.file)
        self.model = self._hash()

    def _hash(self) -> str:
        """Of the folder's files; without the folder, of the only model in the record."""
        if (self.folder / "config.json").exists():
            return dvc_hash(self.folder)
        recorded = sorted(set(self.models.values()))
        if len(recorded) > 1:
            raise ParamsError(
                f"decision.records: {self.file} has answers of {len(recorded)} models; decision.model must name the folder of one"
            )
        if not recorded:
            raise ParamsError(
                f"decision.model: {self.settings.model} is no folder of a model (config.json is missing); name another"
            )
        return recorded[0]

    def _read(self, file: Path) -> None:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
                self.answers[row["request"]] = [float(value) for value in row["logprobs"]]
                self.models[row["request"]] = str(row["model"])
            except (ValueError, KeyError, TypeError) as error:
                raise ParamsError(
                    f"decision.records: line {number} of {file} is no recorded answer ({error}); remove it"
                ) from error

    def choose(self, prompts: Sequence[str], keys: Sequence[tuple[object, ...]]) -> list[list[int]]:
        """`subgoals` different goals for each prompt, drawn one after the other by softmax(mean log-probability per token /
        temperature)."""
        names = [params_hash({"model": self.model, "prompt": prompt}) for prompt in prompts]
        unknown = {name: prompt for name, prompt in zip(names, prompts, strict=True) if name not in self.answers}
        for name, prompt in unknown.items():
            self.answers[name], self.models[name] = self._ask(prompt), self.model
        found = []
        for name, key in zip(names, keys, strict=True):
            scores = torch.tensor(self.answers[name], dtype=torch.float64) / self.settings.temperature
            rng, goals = stream(*key, "decision"), list[int]()
            for _ in range(self.settings.subgoals):
                shares = torch.softmax(scores, -1)
                drawn = int((rng.random() >= shares.cumsum(-1)).sum())
                goals.append(drawn if drawn < len(GOALS) else int(shares.nonzero()[-1]))
                scores[goals[-1]] = -torch.inf
            found.append(goals)
        return found

    @torch.inference_mode()
    def _ask(self, prompt: str) -> list[float]:
        """The goals' mean log-probabilities per token, rounded so that a record holds them exactly."""
        from stages.agent.chat import Chat
        from stages.agent.logprobs import head_logprobs
        from stages.agent.policy import load_policy
        from stages.values.q_model import action_mask, action_states

        if self._loaded is None:
            policy = load_policy(self.folder, attention="sdpa")
            self._loaded = policy.model, Chat(policy.tokenizer)
        model, chat = self._loaded
        goals = [chat.tokens_of(goal) for goal in GOALS]
        lengths, real = action_mask(goals)
        states = action_states(model.base_model, chat.prompt_tokens(prompt), goals)[:, :-1]
        found = torch.zeros(real.shape)
        found[real] = head_logprobs(model, states[real], torch.tensor([token for goal in goals for token in goal]))
        logprobs = found.sum(1) / lengths
        self.calls += 1
        return [round(value, 6) for value in logprobs.tolist()]

    def save(self) -> None:
        """Write the record, if there is to be one, in the order of hashes."""
        if self.file is not None and self.calls:
            rows = (
                {"request": name, "model": self.models[name], "logprobs": self.answers[name]} for name in sorted(self.answers)
            )
            atomic_text(self.file, "".join(json.dumps(row) + "\n" for row in rows))
