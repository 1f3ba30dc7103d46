"""Training forward passes that read a prompt once for all episodes that start with it.

The prompts of a block of episodes go through the model once; what follows them attends to the prompts' keys and values.
Gradients with respect to these are added up over the block's micro-batches and sent back through the prompts in one pass at the
end: so episodes are bucketed by length without regard to their prompts, and memory is that of one micro-batch and the prompts.

The same function as the dense pass (`stages.agent.policy.predicting_states`), to float rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from stages.agent.policy import States
from stages.algorithms.contract import TrajectoryBatch
from stages.training.batches import plan_micro_batches, trained_lengths
from stages.training.recompute import recomputes

WORTH = 1.25
"""Prompts are shared where the dense pass would read this many times the tokens: the explicit mask keeps attention from its
fastest kernel, so that a small saving is none. The number is our choice, not measured."""


@dataclass(frozen=True)
class Block:
    """Rows of a batch with few prompts among them.

    `prompts`: a row per distinct prompt to read it from; `prompt_of`: row -> place in `prompts`; `micro_batches`: the rows.
    """

    prompts: list[int]
    prompt_of: dict[int, int]
    micro_batches: list[list[int]]


def prompt_lengths(mask: Tensor) -> Tensor:
    """Tokens of each row before its first policy token, [B] int64; mask: [B, T] bool with a policy token in each row."""
    return mask.int().argmax(1)


def plan_blocks(batch: TrajectoryBatch, rows: Sequence[int], tokens_per_batch: int, at_least: int = 1) -> list[Block]:
    """`rows` in blocks of at most `tokens_per_batch` prompt tokens (a longer prompt stands alone), in order of their prompts'
    first appearance; inside a block, micro-batches of similar length, each of at most `tokens_per_batch` padded tokens.

    at_least: blocks wanted, as far as there are prompts (one for each process that trains).
    """
    starts, ends = prompt_lengths(batch.mask).tolist(), trained_lengths(batch.mask).tolist()
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        by_prompt.setdefault(tuple(batch.token_ids[row, : starts[row]].tolist()), []).append(row)
    most = -(-len(by_prompt) // at_least)
    blocks: list[Block] = []
    members: list[list[int]] = []
    longest = 0

    def close() -> None:
        chosen = [row for rows in members for row in rows]
        plan = plan_micro_batches([ends[row] - starts[row] for row in chosen], tokens_per_batch)
        prompt_of = {row: place for place, rows in enumerate(members) for row in rows}
        blocks.append(Block([rows[0] for rows in members], prompt_of, [[chosen[place] for place in part] for part in plan]))

    for prompt, same in by_prompt.items():
        full = (len(members) + 1) * max(longest, len(prompt)) > tokens_per_batch or len(members) == most
        if members and full:
            close()
            members, longest = [], 0
        members.append(same)
        longest = max(longest, len(prompt))
    if members:
        close()
    return blocks


def worth_sharing(batch: TrajectoryBatch, blocks: Sequence[Block]) -> bool:
    """Whether reading prompts once saves enough tokens (see WORTH)."""
    starts, ends = prompt_lengths(batch.mask).tolist(), trained_lengths(batch.mask).tolist()
    rows = [row for block in blocks for row in block.prompt_of]
    shared = sum(ends[row] - starts[row] for row in rows) + sum(starts[row] for block in blocks for row in block.prompts)
    return sum(ends[row] for row in rows) >= WORTH * shared


def can_share(model: Any) -> bool:
    """Whether every layer of the model attends to all earlier tokens, and the model keeps keys and values while training."""
    config = model.config
    full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    return full and not getattr(config, "sliding_window", None) and not recomputes(model)


class _Recorded(Cache):
    """Keys and values [U, heads, P, head_dim] of each layer, as the prompts' pass makes them."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.states.append((key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _Prefixed(_Recorded):
    """Puts the prompts' keys and values, picked by row, before those of the rows' own tokens."""

    def __init__(self, prompts: Sequence[tuple[Tensor, Tensor]], prompt_of: Tensor) -> None:
        super().__init__()
        self.prompts, self.prompt_of = prompts, prompt_of

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.prompts[layer_idx]
        keys, values = keys.index_select(0, self.prompt_of), values.index_select(0, self.prompt_of)
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


def _as_mask(model: Any, visible: Tensor) -> Tensor:
    """visible [N, Q, K] bool -> what the model's attention takes: that [N, 1, Q, K], or 0 and the lowest number to be added."""
    if model.config._attn_implementation == "sdpa":
        return visible[:, None]
    low = torch.full((), torch.finfo(model.dtype).min, dtype=model.dtype, device=visible.device)
    return torch.where(visible, torch.zeros_like(low), low)[:, None]


class SharedPrompts:
    """The prompts of a block, read by `model`; see `states_of` and `carry`."""

    def __init__(self, model: Any, batch: TrajectoryBatch, block: Block) -> None:
        device = model.device
        self.model, self.block = model, block
        self.lengths = prompt_lengths(batch.mask)[torch.tensor(block.prompts)].to(device)
        width = int(self.lengths.max())
        token_ids = batch.token_ids[torch.tensor(block.prompts), :width].to(device)
        places = torch.arange(width, device=device)
        cache = _Recorded()
        output = model.base_model(
            input_ids=token_ids,
            attention_mask=_as_mask(model, (places[None, :] <= places[:, None]).expand(len(token_ids), -1, -1)),
            position_ids=places.expand(len(token_ids), -1),
            past_key_values=cache,
            use_cache=True,
        )
        last = output.last_hidden_state[torch.arange(len(token_ids), device=device), self.lengths - 1]
        self._live = [last, *(state for pair in cache.states for state in pair)]
        self._leaves = [state.detach().requires_grad_(torch.is_grad_enabled()) for state in self._live]

    def states_of(self, rows: Sequence[int]) -> States:
        """How to compute the hidden states that predict the policy tokens of these rows of the batch (for `token_logprobs`)."""
        prompt_of = torch.tensor([self.block.prompt_of[row] for row in rows], device=self.model.device)

        def states(model: Any, token_ids: Tensor, mask: Tensor) -> Tensor:
            return self._states(token_ids, mask, prompt_of)

        return states

    def _states(self, token_ids: Tensor, mask: Tensor, prompt_of: Tensor) -> Tensor:
        """Hidden states [n, D] before the policy tokens of token_ids, mask [B, T]; rows start with prompts `prompt_of` [B]."""
        device = token_ids.device
        starts = self.lengths[prompt_of]
        width = int((trained_lengths(mask.cpu()).to(device) - starts).max())
        places = torch.arange(width, device=device)
        prompt_places = torch.arange(int(self._leaves[1].shape[2]), device=device)
        sees_prompt = (prompt_places < starts[:, None])[:, None].expand(-1, width, -1)
        sees_own = (places[None, :] <= places[:, None]).expand(len(token_ids), -1, -1)
        positions = starts[:, None] + places
        output = self.model.base_model(
            input_ids=token_ids.gather(1, positions.clamp(max=token_ids.shape[1] - 1)),
            attention_mask=_as_mask(self.model, torch.cat([sees_prompt, sees_own], 2)),
            position_ids=positions,
            past_key_values=_Prefixed(list(zip(self._leaves[1::2], self._leaves[2::2], strict=True)), prompt_of),
            use_cache=True,
        )
        # What predicts a row's first token is its prompt's last state.
        states = torch.cat([self._leaves[0][prompt_of][:, None], output.last_hidden_state], 1)
        rows, policy = mask.nonzero(as_tuple=True)
        return states[rows, policy - starts[rows]]

    def carry(self) -> Tensor:
        """A scalar of value 0 whose gradient is what the rows' backward passes have gathered at the prompts: run backward on it
        once, after theirs, to send that through the prompts."""
        pairs = zip(self._live, self._leaves, strict=True)
        total = torch.stack([(live * leaf.grad).sum() for live, leaf in pairs if leaf.grad is not None]).sum()
        return total - total.detach()
