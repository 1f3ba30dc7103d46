"""Q-models: rank candidate actions after one history. The policy itself is unchanged.

`PreferenceQ` (step_dpo, trajectory_dpo) is a copy of the SFT policy trained on preference pairs: with the frozen policy as
reference, Q(s, a) = beta * (log pi(a | s) - log pi_ref(a | s)), the true Q up to a term that depends on s only. Its scores are
comparable within a history only. `RegressionQ` reads a scalar at an action's last token, trained on the labels' Q with a head of
`stages.values.heads`; its scores are returns. It may have several such heads, of which the most pessimistic one counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stages.agent.logprobs import States, head_logprobs, token_logprobs
from stages.engine.attention import use_attention
from stages.records.card import Card
from stages.runtime.files import atomic_folder, atomic_text
from stages.seeding import seed_torch
from stages.values.pessimism import aggregated
from stages.values.settings import QModel
from stages.values.step_value import StepValueModel

CARD = Card(
    slug="step_q",
    title="Step-level Q-model",
    paper="Zhai et al., arXiv 2409.09345",
    equation="h(a) = log pi(a | s) - log pi_ref(a | s) over the action's tokens; loss = -log sigmoid(beta (h(winner) - "
    "h(loser))) on pairs of one history; acting: sample n actions and take the one of highest beta h",
    assumptions="the policy is unchanged; scores are comparable within a history only; beta, epochs and rate are ours",
    reduces_to="n = 1: the policy itself; kind trajectory_dpo: one pair compares whole episodes; kind regression: a scalar head "
    "on the labels' Q, or with q_model.ensemble the smallest of several (RAVL)",
    tested_by="tests/values/test_q_model.py, tests/agent/test_best_of_n.py",
    switch="annotate.q_model.kind: step_dpo; evaluate.models: [sft, sft+q]",
)
SETTINGS = "q_model.json"
_MEMBERS = "members.safetensors"


class ActionScorer(Protocol):
    def scores(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> Tensor:
        """[A] float32 on the CPU, higher is better; independent of what else is scored."""
        ...


def action_states(base: Any, history: Sequence[int], actions: Sequence[Sequence[int]]) -> Tensor:
    """Hidden states [A, 1 + L, D] of the history's last token and of the actions' tokens, padded to L; the history is encoded
    once."""
    device = next(base.parameters()).device
    encoded = base(input_ids=torch.tensor([list(history)], device=device), use_cache=True)
    first = encoded.last_hidden_state[:, -1:].expand(len(actions), -1, -1)
    cache = encoded.past_key_values
    cache.batch_repeat_interleave(len(actions))
    width = max(len(action) for action in actions)
    tokens = torch.tensor([[*action, *([0] * (width - len(action)))] for action in actions], device=device)
    states = base(input_ids=tokens, past_key_values=cache, use_cache=True).last_hidden_state
    return torch.cat([first, states], 1)


def action_mask(actions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Lengths [A] of the actions, and which places of the actions padded to L hold a token: [A, L] bool."""
    lengths = torch.tensor([len(action) for action in actions])
    return lengths, torch.arange(int(lengths.max()))[None, :] < lengths[:, None]


class PreferenceQ(nn.Module):
    """`policy`: trained; `reference`: the same model, frozen."""

    def __init__(self, policy: Any, reference: Any, params: QModel) -> None:
        super().__init__()
        self.policy, self.params = policy, params
        self._frozen = [reference]  # in a list, so that it is not a submodule

    @property
    def reference(self) -> Any:
        return self._frozen[0]

    def normalised(self, logprobs: Tensor, tokens: Tensor) -> Tensor:
        """Summed log-probabilities [...], per token if `length_normalise` is set."""
        return logprobs / tokens.clamp(min=1) if self.params.length_normalise else logprobs

    def logprobs(self, model: Any, token_ids: Tensor, mask: Tensor, states: States) -> Tensor:
        """Normalised log-probability [R] under `model` of each row's tokens where `mask`; both [R, T]."""
        device = next(model.parameters()).device
        mask = mask.to(device)
        return self.normalised(token_logprobs(model, token_ids.to(device), mask, states=states).sum(1), mask.sum(1))

    @torch.no_grad()
    def scores(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> Tensor:
        """beta h, [A]; see `ActionScorer`."""
        lengths, real = action_mask(actions)
        targets = torch.tensor([token for action in actions for token in action])
        difference = torch.zeros(real.shape)
        for model, sign in ((self.policy, 1.0), (self.reference, -1.0)):
            states = action_states(model.base_model, history, actions)[:, :-1][real.to(model.device)]
            logs = head_logprobs(model, states, targets.to(model.device))
            difference[real] += sign * logs.float().cpu()
        return self.params.beta * self.normalised(difference.sum(1), lengths)

    def save(self, folder: Path, reference_hash: str) -> None:
        """Write the model; `reference_hash`: the reference policy's."""
        _save(folder, self.policy.save_pretrained, self.params, reference_hash)


class RegressionQ(nn.Module):
    """`model` reads Q(s, a) at the last token of the action. `members` are the output layers of `params.ensemble`, the model's
    own first; without an ensemble that one alone."""

    def __init__(self, model: StepValueModel, params: QModel) -> None:
        super().__init__()
        self.model, self.params = model, params
        further = 0 if params.ensemble is None else params.ensemble.members - 1
        width, outputs = model.output.in_features, model.output.out_features
        device = model.output.weight.device
        self.members = nn.ModuleList([model.output, *(nn.Linear(width, outputs, device=device) for _ in range(further))])

    @torch.no_grad()
    def start_apart(self, *key: object) -> None:
        """Give each member of an ensemble its own random weights, drawn by `key`, and the model's bias."""
        assert self.params.ensemble is not None
        seed_torch(*key, "q_members")
        for member in self.members:
            assert isinstance(member, nn.Linear)
            member.weight.normal_(0.0, self.params.ensemble.spread / member.in_features**0.5)
            member.bias.copy_(self.model.output.bias)

    def member_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, ..., outputs] of hidden states [..., D]."""
        return torch.stack([member(hidden) for member in self.members])

    @torch.no_grad()
    def member_scores(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> Tensor:
        """Every member's Q, [N, A]."""
        states = action_states(self.model.backbone, history, actions)
        last = torch.tensor([len(action) for action in actions], device=states.device)
        final = states[torch.arange(len(actions), device=states.device), last]
        return self.model.head.decode(self.member_logits(final.float())).cpu()

    def scores(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> Tensor:
        """Q, [A]; see `ActionScorer`."""
        values = self.member_scores(history, actions)
        return values[0] if self.params.ensemble is None else aggregated(values, self.params.ensemble.aggregate)

    def save(self, folder: Path, reference_hash: str) -> None:
        """Write the model; `reference_hash`: of the policy whose actions it was trained on."""
        from safetensors.torch import save_file

        def write(partial: Path) -> None:
            self.model.save(partial)
            if self.params.ensemble is not None:
                tensors = {name: value.detach().cpu().contiguous() for name, value in self.members.state_dict().items()}
                save_file(tensors, partial / _MEMBERS, metadata={"format": "pt"})

        _save(folder, write, self.params, reference_hash)


def _regression(folder: Path, params: QModel, device: str) -> RegressionQ:
    from safetensors.torch import load_file

    model = RegressionQ(StepValueModel.load(folder, device), params)
    if params.ensemble is not None:
        model.members.load_state_dict(load_file(folder / _MEMBERS, device=device))
    return model.eval()


def _save(folder: Path, save_model: Callable[[Path], Any], params: QModel, reference_hash: str) -> None:
    with atomic_folder(folder) as partial:
        save_model(partial / "model")
        _write(partial, {"params": params.model_dump(exclude_none=True), "reference": reference_hash})


def _write(folder: Path, settings: dict[str, Any]) -> None:
    atomic_text(folder / SETTINGS, json.dumps(settings, sort_keys=True, indent=1) + "\n")


def save_none(folder: Path) -> None:
    """Record that there is no Q-model, for stages that look for one."""
    _write(folder, {"params": {"kind": "none"}})


def q_model_kind(folder: Path) -> str:
    """`annotate.q_model.kind` of the saved model; none if there is no model."""
    path = folder / SETTINGS
    return str(json.loads(path.read_text(encoding="utf-8"))["params"]["kind"]) if path.exists() else "none"


def load_q_model(folder: Path, reference: Path, device: str = "cpu") -> PreferenceQ | RegressionQ:
    """Load a saved Q-model in evaluation mode; `reference`: the folder of the policy that it was made from.

    Raises FileNotFoundError if it was not saved, ValueError if its kind is none or `reference` is a different policy.
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
        return _regression(folder / "model", params, device)
    if policy_hash(reference) != settings["reference"]:
        raise ValueError(f"{folder} was made from a different policy than {reference}; run the annotate stage again")
    policy: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, local_files_only=True)
    policy.to(device).eval()
    use_attention(policy, "sdpa")
    return PreferenceQ(policy, load_policy(reference, device=device, attention="sdpa").model, params).eval()
