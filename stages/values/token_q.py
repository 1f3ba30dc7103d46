"""Token-level Q of a language model: Q = advantage + value, the advantage from the model's own logits (B-Coder).

    A(s, a) = alpha (log pi(a | s) - max_b log pi(b | s))   at most 0, and 0 for the likeliest token
    V(s)    = r_max - softabs(v(s))                         v: a separate network plus a linear map of the policy's hidden states
    Q(s, a) = A(s, a) + V(s)                                so softmax(Q / alpha) is the policy, for any V

Yu et al., arXiv 2310.03173. Q implies a reward, r~(s, a) = Q(s, a) - gamma V(s'), whose sum ranks actions; with gamma = 1 the sum
is V before the action plus the action's advantages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from stages.agent.logprobs import through_head
from stages.runtime.files import atomic_folder
from stages.values.q_model import action_mask, action_states

FOLDER = "value"
"""Subfolder of the policy's folder."""
_SETTINGS, _HEADS = "value.json", "heads.safetensors"


def softabs(x: Tensor) -> Tensor:
    """(softplus(x) + softplus(-x)) / 2 - log 2, which is log cosh(x / 2): 0 at 0, about |x| / 2 - log 2 far from it."""
    return (softplus(x) + softplus(-x)) / 2 - math.log(2)


def bounded(raw: Tensor, r_max: float) -> Tensor:
    """V from the networks' output: r_max at 0, lower elsewhere."""
    return r_max - softabs(raw)


def raw_of(value: float, r_max: float, least: float = 0.05) -> float:
    """The positive output for which `bounded` is min(value, r_max - least); at r_max itself the gradient would be 0."""
    return 2 * math.acosh(math.exp(max(r_max - value, least)))


def advantages(logprobs: Tensor, best: Tensor, alpha: float) -> Tensor:
    """A of tokens with these log-probabilities; `best`: the likeliest tokens'."""
    return alpha * (logprobs - best)


def recovered(advantage: Tensor, value: Tensor, following: Tensor, gamma: float) -> Tensor:
    """r~ = A + V - gamma V(s'), all of one shape; `following`: V after the token, 0 at the episode's end."""
    return advantage + value - gamma * following


def target_and_best(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [c] of targets [c] and of the likeliest tokens, from logits [c, V]."""
    logs = logits.log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0], logs.amax(-1)


@dataclass(frozen=True)
class Scale:
    """Constants of A, V and r~."""

    alpha: float = 1.0
    gamma: float = 1.0
    r_max: float = 1.0


class TokenQ(nn.Module):
    """`policy`: a causal LM; `backbone`, `output`: the value network; `residual`: linear map of the policy's hidden states."""

    def __init__(self, policy: Any, backbone: Any, output: nn.Linear, residual: nn.Linear, scale: Scale) -> None:
        super().__init__()
        self.policy, self.backbone, self.output, self.residual, self.scale = policy, backbone, output, residual, scale

    @torch.no_grad()
    def rewards(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """r~ and A of every token of A actions after one history, and the mask of real tokens: [A, L] each, on the CPU. The
        end of an action is treated as the end of the episode."""
        _, real = action_mask(actions)
        states = action_states(self.policy.base_model, history, actions)[:, :-1]
        raw = self.output(action_states(self.backbone, history, actions)[:, :-1].float()) + self.residual(states.float())
        value = bounded(raw[..., 0], self.scale.r_max).cpu() * real
        targets = torch.tensor([token for action in actions for token in action], device=states.device)
        taken, best = through_head(self.policy, states[real.to(states.device)], target_and_best, targets)
        advantage = torch.zeros(real.shape)
        advantage[real] = advantages(taken, best, self.scale.alpha).cpu()
        following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
        return recovered(advantage, value, following, self.scale.gamma) * real, advantage, real

    def scores(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> Tensor:
        """R~ = sum of r~, [A]; see stages.values.q_model.ActionScorer."""
        return self.rewards(history, actions)[0].sum(1)

    def save(self, folder: Path) -> None:
        """Write everything except the policy to a subfolder of the policy's `folder`."""
        from safetensors.torch import save_file

        parts = {"output": self.output, "residual": self.residual}
        tensors = {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, part in parts.items()
            for key, value in part.state_dict().items()
        }
        with atomic_folder(folder / FOLDER) as partial:
            self.backbone.save_pretrained(partial)
            save_file(tensors, partial / _HEADS, metadata={"format": "pt"})
            (partial / _SETTINGS).write_text(json.dumps(asdict(self.scale), sort_keys=True, indent=1) + "\n", encoding="utf-8")


def has_token_q(folder: Path) -> bool:
    """Whether the policy in `folder` has a token-level Q."""
    return (folder / FOLDER / _SETTINGS).exists()


def load_token_q(folder: Path, device: str = "cpu") -> TokenQ:
    """Load the token-level Q of the policy in `folder`, in evaluation mode. Raises FileNotFoundError if there is none."""
    from safetensors.torch import load_file
    from transformers import AutoModel

    from stages.agent.policy import load_policy

    source = folder / FOLDER
    if not has_token_q(folder):
        raise FileNotFoundError(
            f"{source / _SETTINGS} is missing: the policy in {folder} has no token-level Q; set rl.algorithm to b_coder and run "
            f"rl again"
        )
    scale = Scale(**json.loads((source / _SETTINGS).read_text(encoding="utf-8")))
    policy = load_policy(folder, device=device, attention="sdpa").model
    backbone: Any = AutoModel.from_pretrained(source, dtype=torch.float32, local_files_only=True)
    output, residual = (nn.Linear(policy.config.hidden_size, 1) for _ in range(2))
    tensors = load_file(source / _HEADS)
    for name, part in (("output", output), ("residual", residual)):
        part.load_state_dict({key: tensors[f"{name}.{key}"] for key in part.state_dict()})
    return TokenQ(policy, backbone, output, residual, scale).to(device).eval()
