"""Q-models: rank the actions that a policy could take from one history. The policy itself is left as it is.

`PreferenceQ` (step_dpo, trajectory_dpo) is a copy of the SFT policy that has learnt preference pairs: with the frozen policy as
reference, Q(s, a) = beta * (log pi(a | s) - log pi_ref(a | s)), which is the true Q up to a term of s alone. Its scores rank
actions of one history and mean nothing across histories. `RegressionQ` reads a scalar at an action's last token and has learnt
the labels' Q with a head of `stages.values.heads`; it is on the scale of returns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stages.agent.logprobs import head_logprobs, token_logprobs
from stages.engine.attention import use_attention
from stages.records.card import Card
from stages.runtime.files import atomic_folder, atomic_text
from stages.values.settings import QModel
from stages.values.step_value import StepValueModel

CARD = Card(
    slug="step_q",
    title="Step-level Q-model",
    paper="Zhai et al., arXiv 2409.09345",
    equation="h(a) = log pi(a | s) - log pi_ref(a | s) over the action's tokens; loss = -log sigmoid(beta (h(winner) - "
    "h(loser))) on pairs of one history; acting: n actions are drawn and the one of highest beta h is taken",
    assumptions="the policy stays as it is; scores compare actions of one history alone; beta, epochs and rate are ours",
    reduces_to="n = 1: the policy itself; kind trajectory_dpo: one pair compares whole episodes; kind regression: a scalar head "
    "on the labels' Q",
    tested_by="tests/values/test_q_model.py, tests/agent/test_best_of_n.py",
    switch="annotate.q_model.kind: step_dpo; evaluate.models: [sft, sft+q]",
)
SETTINGS = "q_model.json"


class ActionScorer(Protocol):
    """What ranks actions."""

    def scores(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> Tensor:
        """[A] float32 on the CPU, the higher the better; the same for a history and its actions whatever else is scored."""
        ...


def after(base: Any, history: Sequence[int], actions: Sequence[Sequence[int]]) -> Tensor:
    """Hidden states [A, 1 + L, D] of the history's last token and of the actions' tokens, padded to L; the history is read
    once."""
    device = next(base.parameters()).device
    read = base(input_ids=torch.tensor([list(history)], device=device), use_cache=True)
    first = read.last_hidden_state[:, -1:].expand(len(actions), -1, -1)
    cache = read.past_key_values
    cache.batch_repeat_interleave(len(actions))
    width = max(len(action) for action in actions)
    tokens = torch.tensor([[*action, *([0] * (width - len(action)))] for action in actions], device=device)
    behind = base(input_ids=tokens, past_key_values=cache, use_cache=True).last_hidden_state
    return torch.cat([first, behind], 1)


class PreferenceQ(nn.Module):
    """`policy`: trained; `reference`: the same model, frozen."""

    def __init__(self, policy: Any, reference: Any, params: QModel) -> None:
        super().__init__()
        self.policy, self.params = policy, params
        self._frozen = [reference]  # in a list, so that it is no part of the module

    @property
    def reference(self) -> Any:
        return self._frozen[0]

    def scaled(self, logprobs: Tensor, tokens: Tensor) -> Tensor:
        """Summed log-probabilities [...] as the model compares them: as they are, or per token."""
        return logprobs / tokens.clamp(min=1) if self.params.length_normalise else logprobs

    def logprobs(self, model: Any, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Log-probability under `model` of the tokens of each row where `mask`, both [R, T], as the model compares them: [R]."""
        device = next(model.parameters()).device
        mask = mask.to(device)
        return self.scaled(token_logprobs(model, token_ids.to(device), mask).sum(1), mask.sum(1))

    @torch.no_grad()
    def scores(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> Tensor:
        """beta h, [A]; see `ActionScorer`."""
        lengths = torch.tensor([len(action) for action in actions])
        real = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
        targets = torch.tensor([token for action in actions for token in action])
        difference = torch.zeros(real.shape)
        for model, sign in ((self.policy, 1.0), (self.reference, -1.0)):
            states = after(model.base_model, history, actions)[:, :-1][real.to(model.device)]
            logs = head_logprobs(model, states, targets.to(model.device))
            difference[real] += sign * logs.float().cpu()
        return self.params.beta * self.scaled(difference.sum(1), lengths)

    def save(self, folder: Path, reference_hash: str) -> None:
        """Write the model; `reference_hash` names the policy that the reference is."""
        with atomic_folder(folder) as partial:
            self.policy.save_pretrained(partial / "model")
            _write(partial, {"params": self.params.model_dump(), "reference": reference_hash})


class RegressionQ(nn.Module):
    """`model` reads Q(s, a) at the last token of the action."""

    def __init__(self, model: StepValueModel, params: QModel) -> None:
        super().__init__()
        self.model, self.params = model, params

    @torch.no_grad()
    def scores(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> Tensor:
        """Q, [A]; see `ActionScorer`."""
        states = after(self.model.backbone, history, actions)
        last = torch.tensor([len(action) for action in actions], device=states.device)
        read = states[torch.arange(len(actions), device=states.device), last]
        return self.model.head.decode(self.model.output(read.float())).cpu()

    def save(self, folder: Path, reference_hash: str) -> None:
        """Write the model; `reference_hash` names the policy whose actions it has seen."""
        with atomic_folder(folder) as partial:
            self.model.save(partial / "model")
            _write(partial, {"params": self.params.model_dump(), "reference": reference_hash})


def _write(folder: Path, settings: dict[str, Any]) -> None:
    atomic_text(folder / SETTINGS, json.dumps(settings, sort_keys=True, indent=1) + "\n")


def save_none(folder: Path) -> None:
    """Say that there is no Q-model, for stages that look for one."""
    _write(folder, {"params": {"kind": "none"}})


def q_model_kind(folder: Path) -> str:
    """`annotate.q_model.kind` of what was saved; none where there is nothing."""
    path = folder / SETTINGS
    return str(json.loads(path.read_text(encoding="utf-8"))["params"]["kind"]) if path.exists() else "none"


def load_q_model(folder: Path, reference: Path, device: str = "cpu") -> PreferenceQ | RegressionQ:
    """Read what was saved, in evaluation mode; `reference`: the folder of the policy that it was made from.

    Raises FileNotFoundError if there is none, ValueError if there is none by choice or another policy is in `reference`.
    """
    from transformers import AutoModelForCausalLM

    from stages.agent.policy import load_policy, policy_hash

    if not (folder / SETTINGS).exists():
        raise FileNotFoundError(f"{folder / SETTINGS} is missing; run the annotate stage for {folder.name} again")
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    if settings["params"]["kind"] == "none":
        raise ValueError(f"{folder} holds no Q-model; set annotate.q_model.kind to step_dpo or regression and run annotate again")
    params = QModel.model_validate(settings["params"])
    if params.kind == "regression":
        return RegressionQ(StepValueModel.load(folder / "model", device), params).eval()
    if policy_hash(reference) != settings["reference"]:
        raise ValueError(f"{reference} is not the policy that {folder} was made from; run the annotate stage again")
    policy: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, local_files_only=True)
    policy.to(device).eval()
    use_attention(policy, "sdpa")
    return PreferenceQ(policy, load_policy(reference, device=device, attention="sdpa").model, params).eval()
