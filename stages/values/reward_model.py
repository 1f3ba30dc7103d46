"""A reward model of whole episodes: a scalar at the last token of the policy, fitted to preference pairs (Bradley-Terry).

loss = -log sigmoid(s(winner) - s(loser)), as in Agent-RLVR (arXiv 2506.11425), where it ranks the samples of a task at test time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from stages.runtime.files import atomic_folder

FOLDER = "reward"
"""Subfolder of the policy's folder."""
_HEAD = "reward_head.safetensors"


class RewardModel(nn.Module):
    """`backbone`: a Hugging Face base model; its output starts at zero, so that all episodes are equal."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.output = nn.Linear(backbone.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.output.weight)

    @classmethod
    def of(cls, policy: Any) -> RewardModel:
        """A copy of the policy's backbone with a new output."""
        return cls(copy.deepcopy(policy.base_model))

    def forward(self, token_ids: Tensor, last: Tensor) -> Tensor:
        """Scores [B] float32 of token_ids [B, T] at the places last [B]. Attention is causal, so right padding needs no mask."""
        hidden = self.backbone(input_ids=token_ids, use_cache=False).last_hidden_state
        return self.output(hidden[torch.arange(len(last), device=hidden.device), last].float())[:, 0]

    @torch.no_grad()
    def scores(self, episodes: Sequence[Sequence[int]]) -> list[float]:
        """The score of each episode's tokens, up to the policy's last; each is read alone, so that none depends on another."""
        device = self.output.weight.device
        found = []
        for tokens in episodes:
            last = torch.tensor([len(tokens) - 1], device=device)
            found.append(float(self(torch.tensor([list(tokens)], device=device), last)))
        return found

    def save(self, folder: Path) -> None:
        """Write the backbone as a `save_pretrained` folder, with the output in it."""
        from safetensors.torch import save_file

        with atomic_folder(folder) as partial:
            self.backbone.save_pretrained(partial)
            weight = self.output.weight.detach().cpu().contiguous()
            save_file({"weight": weight}, partial / _HEAD, metadata={"format": "pt"})


def has_reward_model(policy: Path) -> bool:
    """Whether a policy's folder has a reward model."""
    return (policy / FOLDER / _HEAD).exists()


def load_reward_model(policy: Path, device: str = "cpu") -> RewardModel:
    """The reward model in a policy's folder, in evaluation mode. Raises FileNotFoundError if there is none."""
    from safetensors.torch import load_file
    from transformers import AutoModel

    if not has_reward_model(policy):
        raise FileNotFoundError(f"{policy / FOLDER} has no reward model; set rl.preference.reward_model to true and run rl again")
    model = RewardModel(AutoModel.from_pretrained(policy / FOLDER, dtype=torch.float32, local_files_only=True))
    model.output.load_state_dict(load_file(policy / FOLDER / _HEAD))
    return model.to(device).eval()


def bradley_terry(win: Tensor, lose: Tensor) -> Tensor:
    """-log sigmoid(s(winner) - s(loser)), [P]."""
    return -logsigmoid(win - lose)


def best_of(scores: Sequence[float]) -> int:
    """Index of the highest score, the first of ties; a score that is not a number is the lowest."""
    return max(range(len(scores)), key=lambda place: (-float("inf") if scores[place] != scores[place] else scores[place], -place))
