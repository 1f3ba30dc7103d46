"""The step-value model: V(history before a turn), the SFT policy's expected return from there on.

A copy of the policy's backbone (no output layer) with a scalar head of `stages.values.heads`, read at the last token before a
turn. Targets are mean returns of policy rollouts (success rates, if only success is rewarded), weighted by their number. Splits
are by task, so calibration is measured on unseen tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stages.runtime.files import atomic_folder
from stages.seeding import seed_torch
from stages.values import fitting
from stages.values.contract import ValueHead
from stages.values.fitting import FitReport, token_batches
from stages.values.head_fitting import States, fit_head
from stages.values.heads import make_head
from stages.values.hidden_head import fit_hidden, make_hidden
from stages.values.settings import HeadParams, ValueModel


@dataclass(frozen=True)
class ValuePath:
    """One history: T tokens, and the boundaries (index of the last token before a turn) where the value is learnt."""

    task_id: str
    token_ids: list[int]
    boundaries: list[int]
    returns: list[float]
    """Sum of the returns of the rollouts from each boundary."""
    rollouts: list[float]

    rows = 1

    @property
    def width(self) -> int:
        return len(self.token_ids)


@dataclass
class _Batch:
    """P paths of T padded tokens with U boundaries each."""

    token_ids: Tensor
    lengths: Tensor
    boundaries: Tensor
    """[P, U] int64, padded with -1."""
    targets: Tensor
    weights: Tensor
    """[P, U] float32, padded with 0."""


class StepValueModel(nn.Module):
    """`backbone`: a Hugging Face base model; `params`: its head; `hidden`: units of a layer before it, 0 for none."""

    def __init__(self, backbone: Any, params: HeadParams, hidden: int = 0) -> None:
        super().__init__()
        self.backbone, self.params = backbone, params
        self.head: ValueHead = make_head(params)
        width = backbone.config.hidden_size
        self.output: nn.Linear | nn.Sequential
        if hidden:
            self.output = make_hidden(width, hidden, self.head.outputs)
        else:
            self.output = nn.Linear(width, self.head.outputs)
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)

    @torch.no_grad()
    def start_at(self, shares: Tensor, weights: Tensor) -> None:
        """Initialise the untrained model to the best constant prediction for targets [M] with weights [M]: its output weights are
        zero, so the bias is set to the weighted mean of the encoded targets."""
        encoded = self.head.encode(shares)
        mean = (encoded.reshape(len(shares), -1) * weights[:, None]).sum(0) / weights.sum()
        last: Any = self.output[-1] if isinstance(self.output, nn.Sequential) else self.output
        last.bias.copy_(mean if self.head.outputs == 1 else mean.clamp(min=1e-6).log())

    def hidden(self, token_ids: Tensor, boundaries: Tensor) -> Tensor:
        """Hidden states [B, U, D] in float32 at `boundaries`; -1 reads position 0 and must be masked by the caller. Attention is
        causal, so right padding needs no mask."""
        hidden = self.backbone(input_ids=token_ids, use_cache=False).last_hidden_state
        index = boundaries.clamp(min=0).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        return hidden.gather(1, index).float()

    def logits(self, token_ids: Tensor, boundaries: Tensor) -> Tensor:
        """[B, U, outputs] of `hidden`."""
        return self.output(self.hidden(token_ids, boundaries))

    @torch.no_grad()
    def turn_values(self, token_ids: Tensor, lengths: Tensor, boundaries: Tensor) -> Tensor:
        """Values before turns: token_ids [B, T] int64 padded on the right, lengths [B], boundaries [B, U] -> [B, U] float32.

        boundaries[b, u] is the index of the last token before turn u (the end of the generation prompt); -1, with value 0, past
        the last turn. Raises ValueError for a boundary in the padding.
        """
        if bool((boundaries >= lengths[:, None]).any()):
            raise ValueError("a boundary is past the end of its sequence; boundaries index the last token before each turn")
        values = self.head.decode(self.logits(token_ids, boundaries))
        return torch.where(boundaries >= 0, values, torch.zeros_like(values))

    def save(self, folder: Path) -> None:
        """Write the backbone as a `save_pretrained` folder, with head.safetensors and head.json in it."""
        from safetensors.torch import save_file

        tensors = {name: value.detach().cpu().contiguous() for name, value in self.output.state_dict().items()}
        settings = json.dumps(self.params.model_dump(), sort_keys=True, indent=1) + "\n"
        with atomic_folder(folder) as partial:
            self.backbone.save_pretrained(partial)
            save_file(tensors, partial / "head.safetensors", metadata={"format": "pt"})
            (partial / "head.json").write_text(settings, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path | str, device: str = "cpu") -> StepValueModel:
        """Load what `save` wrote, in evaluation mode. Raises FileNotFoundError naming a missing file."""
        from safetensors.torch import load_file
        from transformers import AutoModel

        folder = Path(folder)
        for name in ("config.json", "model.safetensors", "head.json", "head.safetensors"):
            if not (folder / name).exists() and not (name == "model.safetensors" and any(folder.glob("model-*.safetensors"))):
                raise FileNotFoundError(f"{folder / name} is missing: incomplete step-value model; run the annotate stage again")
        params = HeadParams.model_validate_json((folder / "head.json").read_text(encoding="utf-8"))
        backbone = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tensors = load_file(folder / "head.safetensors")
        model = cls(backbone, params, len(tensors.get("0.bias", ())))
        model.output.load_state_dict(tensors)
        return model.to(device).eval()


def check_same_head(start: StepValueModel, params: HeadParams) -> None:
    """Raise ValueError if a critic with this head cannot start from the step-value model."""
    if start.params != params:
        raise ValueError(
            f"rl.critic.init: value_model needs the step-value model's head, {start.params.model_dump()}, but rl.critic.head is "
            f"{params.model_dump()}; set it to annotate.value_model.head"
        )


def _collate(paths: Sequence[ValuePath]) -> _Batch:
    width, places = max(len(path.token_ids) for path in paths), max(len(path.boundaries) for path in paths)
    token_ids = torch.zeros(len(paths), width, dtype=torch.int64)
    boundaries = torch.full((len(paths), places), -1, dtype=torch.int64)
    targets, weights = torch.zeros(len(paths), places), torch.zeros(len(paths), places)
    for row, path in enumerate(paths):
        count = len(path.boundaries)
        token_ids[row, : len(path.token_ids)] = torch.tensor(path.token_ids)
        boundaries[row, :count] = torch.tensor(path.boundaries)
        weights[row, :count] = torch.tensor(path.rollouts)
        targets[row, :count] = torch.tensor([s / n for s, n in zip(path.returns, path.rollouts, strict=True)])
    return _Batch(token_ids, torch.tensor([len(path.token_ids) for path in paths]), boundaries, targets, weights)


Reading = Callable[[StepValueModel, Sequence[ValuePath], int], States]
"""(model, paths, most tokens of a batch) -> the states at the paths' boundaries, as `read_states` reads them."""


def state_runs(paths: Sequence[ValuePath], micro_tokens: int) -> list[list[ValuePath]]:
    """The batches in which the states of `paths` are read: paths of about equal length, at most `micro_tokens` padded tokens."""
    return token_batches(sorted(paths, key=lambda path: len(path.token_ids)), micro_tokens)


@torch.no_grad()
def read_run(model: StepValueModel, run: Sequence[ValuePath]) -> tuple[Tensor, Tensor, Tensor]:
    """The backbone's states [N, D] at all boundaries of one batch, with their targets [N] and rollouts [N]."""
    device, item = next(model.parameters()).device, _collate(run)
    hidden = model.hidden(item.token_ids.to(device), item.boundaries.to(device))
    real = (item.boundaries >= 0).to(device)
    return hidden[real], item.targets.to(device)[real], item.weights.to(device)[real]


def joined(parts: Sequence[tuple[Tensor, Tensor, Tensor]], runs: Sequence[Sequence[ValuePath]]) -> States:
    """What `read_run` read of all `runs`, in their order."""
    states, targets, weights = (torch.cat(column) for column in zip(*parts, strict=True))
    return States(states, targets, weights, [path.task_id for run in runs for path in run for _ in path.boundaries])


def read_states(model: StepValueModel, paths: Sequence[ValuePath], micro_tokens: int) -> States:
    """The backbone's states at all boundaries of `paths`, with their targets and rollouts."""
    runs = state_runs(paths, micro_tokens)
    return joined([read_run(model, run) for run in runs], runs)


def fit(
    model: StepValueModel,
    paths: Sequence[ValuePath],
    params: ValueModel,
    seed: int,
    micro_tokens: int,
    on_step: Callable[[int, int, float], None] | None = None,
    read: Reading = read_states,
) -> FitReport:
    """Initialise to the best constant prediction and fit in place with the head's loss, weighted by rollouts: the head alone, on
    the states that `read` finds as `read_states` does, or the backbone too, as `params.trains` says. Raises ValueError without
    paths."""
    if not paths:
        raise ValueError("there are no examples to fit to")
    seed_torch(seed, "value_model")
    device = next(model.parameters()).device
    shares = [total / count for path in paths for total, count in zip(path.returns, path.rollouts, strict=True)]
    counts = [count for path in paths for count in path.rollouts]
    model.start_at(torch.tensor(shares, device=device), torch.tensor(counts, device=device))
    if params.trains == "head":
        model.eval()
        states = read(model, paths, micro_tokens)
        if isinstance(model.output, nn.Sequential):
            report = fit_hidden(model.output, model.head, states, seed)
        else:
            report = fit_head(model.output, model.head, states, params.l2, seed)
        report.tokens = sum(len(path.token_ids) for path in paths)
        if on_step:
            on_step(0, report.tokens, report.history[-1])
    else:
        model.train()

        def loss(run: Sequence[ValuePath]) -> Tensor:
            item = _collate(run)
            logits = model.logits(item.token_ids.to(device), item.boundaries.to(device))
            return (model.head.loss(logits, item.targets.to(device)) * item.weights.to(device)).sum()

        key = (seed, "value_epoch")
        report = fitting.fit(model, paths, loss, lambda path: sum(path.rollouts), params, micro_tokens, *key, on_step=on_step)
    report.clamped = float(model.head.outside(torch.tensor(shares)).float().mean())
    model.eval()
    return report


def predict(model: StepValueModel, paths: Sequence[ValuePath], micro_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictions, targets and rollouts, each [M] float64, at all boundaries of `paths`."""
    device = next(model.parameters()).device
    model.eval()
    parts = []
    for run in token_batches(sorted(paths, key=lambda path: len(path.token_ids)), micro_tokens):
        item = _collate(run)
        values = model.turn_values(item.token_ids.to(device), item.lengths.to(device), item.boundaries.to(device)).cpu()
        real = item.boundaries >= 0
        parts.append((values[real], item.targets[real], item.weights[real]))
    predicted, shares, counts = (torch.cat(column).double().numpy() for column in zip(*parts, strict=True))
    return predicted, shares, counts
