"""Log-probabilities and entropies of given tokens under a model, for training and scoring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stages.agent.frozen_head import frozen_head, in_chunks, is_frozen
from stages.agent.upcast_linear import upcast_linear
from stages.engine.head import finished_logits

CHUNK, CHUNK_LOGITS = 8192, 1 << 26
"""Positions whose logits over the vocabulary are held at once: at most so many, with at most so many logits (256 MB)."""
ReadLogits = Callable[..., tuple[Tensor, ...]]
"""(logits / temperature [c, V] float32, slices [c] of the extra tensors) -> values [c] each."""


def hidden_states(model: Any, token_ids: Tensor) -> Tensor:
    """Last hidden states [B, T, D], after the final norm, of right-padded `token_ids` [B, T].

    Attention is causal, so padding on the right reaches no real token and needs no mask.
    """
    return model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state


def predicting_states(model: Any, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Last hidden states [n, D] at the positions that predict the masked tokens [B, T], in the order of `mask.nonzero()`."""
    rows, columns = mask.nonzero(as_tuple=True)
    return hidden_states(model, token_ids)[rows, columns - 1]


States = Callable[[Any, Tensor, Tensor], Tensor]
"""(model, token_ids [B, T], mask [B, T]) -> hidden states [n, D], as `predicting_states`."""


def states_at(states: States, model: Any, token_ids: Tensor, places: Tensor) -> Tensor:
    """Hidden states [B, K, D] of the tokens at `places` [B, K] of token_ids [B, T]; 0 for a place of -1."""
    ids, real = functional.pad(token_ids, (0, 1)), places >= 0
    rows, columns = real.nonzero(as_tuple=True)
    following = places[rows, columns] + 1
    mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    mask[rows, following] = True
    found = states(model, ids, mask)
    number = mask.flatten().cumsum(0).view(mask.shape) - 1
    read = torch.zeros(*places.shape, found.shape[-1], dtype=found.dtype, device=found.device)
    return read.index_put((rows, columns), found[number[rows, following]])


@dataclass(frozen=True)
class Vocabulary:
    """Statistics of the policy's distribution over the vocabulary before each token: [B, T] float32, 0 where the mask is off."""

    mean: Tensor
    """Mean log-probability, -log V - KL(uniform || policy); without gradient."""
    normaliser: Tensor
    """log sum exp of the logits (over temperature): a token's logit is its log-probability plus this."""


@dataclass(frozen=True)
class TokenScores:
    """Values at masked tokens: [B, T] float32 each, 0 elsewhere; None if not requested."""

    logprobs: Tensor
    entropy: Tensor | None = None
    """Nats."""
    vocabulary: Vocabulary | None = None


def through_head(
    model: Any, hidden: Tensor, read: ReadLogits, *along: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> list[Tensor]:
    """Apply `read` to the logits of hidden states [N, D]: [N] float32 each. `along`: [N] tensors that `read` gets slices of.

    The output layer computes in float32 even under autocast or with weights of lower precision: bfloat16 logits are off by up to
    1/256 of their value, and so are probability ratios. `chunk` rows are processed at a time (default: by the vocabulary's size,
    see CHUNK_LOGITS), so that memory is chunk x vocabulary whatever N is: with gradients on, a frozen output layer computes those
    of the hidden states at once (stages.agent.frozen_head), and another's logits are recomputed in the backward pass. `read` must
    depend on nothing else that has a gradient.
    """
    layer = model.get_output_embeddings()
    head = _at_least_float32(layer, hidden.dtype)
    chunk = chunk or max(1, min(CHUNK, CHUNK_LOGITS // getattr(layer, "out_features", 1)))

    def part(hidden: Tensor, *along: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            logits = finished_logits(model, head(hidden).float())
            return read(logits / temperature if temperature != 1.0 else logits, *along)

    arguments = (hidden, *along)
    if torch.is_grad_enabled() and hidden.requires_grad and is_frozen(layer):
        return list(frozen_head(part, chunk, *arguments))
    recompute = torch.is_grad_enabled() and len(hidden) > chunk
    parts = [
        checkpoint(part, *pieces, use_reentrant=False) if recompute else part(*pieces) for pieces in in_chunks(arguments, chunk)
    ]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _at_least_float32(layer: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """`layer`, in at least float32, with inputs of `dtype` and weights of that or lower precision."""
    wanted = torch.promote_types(dtype, torch.float32)
    if all(parameter.dtype == wanted for parameter in layer.parameters()):
        return lambda inputs: layer(inputs.to(wanted))
    return lambda inputs: upcast_linear(inputs.to(wanted), layer.weight, layer.bias)


def only_kept(logits: Tensor, kept: Tensor) -> Tensor:
    """Logits [c, V] with probability 0 for the tokens outside each row's set of `kept` [c, K], token ids padded with -1; a row
    of -1 alone keeps all, and one with -2 - id all but these."""
    vocabulary = logits.shape[-1]
    allowed = torch.zeros(len(logits), vocabulary + 1, dtype=torch.bool, device=logits.device)
    allowed.scatter_(1, torch.where(kept < 0, vocabulary, kept).long(), True)
    allowed = allowed[:, :vocabulary] | (kept < 0).all(1)[:, None]
    if bool((kept < -1).any()):
        without = torch.zeros(len(logits), vocabulary + 1, dtype=torch.bool, device=logits.device)
        without.scatter_(1, torch.where(kept < -1, -2 - kept, vocabulary).long(), True)
        allowed &= ~without[:, :vocabulary]
    # Finite, since p log p of -inf is NaN; half of the lowest number, so that subtracting from it stays finite.
    return logits.masked_fill(~allowed, torch.finfo(logits.dtype).min / 2)


def _reader(entropy: bool = False, entropy_gradient: bool = True, vocabulary: bool = False) -> ReadLogits:
    """Reads the target's log-probability, then, if requested, the entropy and the fields of `Vocabulary`; under the distribution
    over the kept tokens, if there are any."""

    def read(logits: Tensor, targets: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        logits = only_kept(logits, *kept) if kept else logits
        logs = logits.log_softmax(-1)
        found = [logs.gather(-1, targets[:, None])[:, 0]]
        if entropy:
            source = logs if entropy_gradient else logs.detach()
            found.append(-(source.exp() * source).sum(-1))
        if vocabulary:
            found += [logs.detach().mean(-1), logits.logsumexp(-1)]
        return tuple(found)

    return read


def head_logprobs(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities [N] float32 of `targets` [N] given the hidden states [N, D] that predict them."""
    return through_head(model, hidden, _reader(), targets)[0]


def token_scores(
    model: Any,
    token_ids: Tensor,
    mask: Tensor,
    read: ReadLogits,
    *along: Tensor,
    temperature: float = 1.0,
    states: States = predicting_states,
    chunk: int | None = None,
) -> list[Tensor]:
    """Apply `read` to the logits before each masked token: [B, T] float32 each, 0 elsewhere (see `through_head`).

    token_ids, mask and `along`: [B, T] (`along` also [B, T, K]), padded on the right. The output layer runs at the masked
    positions alone. `states` computes the hidden states. Raises ValueError if the mask covers a row's first token, which nothing
    predicts.
    """
    if bool(mask[:, 0].any()):
        raise ValueError("the mask covers the first token of a row; nothing comes before it that could predict it")
    rows, columns = mask.nonzero(as_tuple=True)
    hidden = states(model, token_ids, mask)
    chosen = (tensor[rows, columns] for tensor in along)
    found = through_head(model, hidden, read, *chosen, temperature=temperature or 1.0, chunk=chunk)
    zeros = torch.zeros(mask.shape, dtype=torch.float32, device=hidden.device)
    return [zeros.index_put((rows, columns), values) for values in found]


def score_tokens(
    model: Any,
    token_ids: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    *,
    states: States = predicting_states,
    chunk: int | None = None,
    entropy: bool = False,
    entropy_gradient: bool = True,
    vocabulary: bool = False,
    kept: Tensor | None = None,
) -> TokenScores:
    """Log-probability of each masked token given the tokens before it, under softmax(logits / temperature), with entropies and
    `Vocabulary` if requested; see `token_scores`. `entropy_gradient=False` detaches entropies, which saves a matrix of logits in
    the backward pass. kept [B, T, K]: the tokens that each was drawn from, over which the softmax is taken; see `only_kept`."""
    read = _reader(entropy, entropy_gradient, vocabulary)
    settings: Any = {"temperature": temperature, "states": states, "chunk": chunk}
    along = (token_ids,) if kept is None else (token_ids, kept)
    logprobs, *others = token_scores(model, token_ids, mask, read, *along, **settings)
    entropies = others.pop(0) if entropy else None
    return TokenScores(logprobs, entropies, Vocabulary(*others) if vocabulary else None)


def token_logprobs(
    model: Any,
    token_ids: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    *,
    states: States = predicting_states,
    kept: Tensor | None = None,
) -> Tensor:
    """Log-probabilities of `score_tokens` alone: [B, T] float32."""
    return score_tokens(model, token_ids, mask, temperature, states=states, kept=kept).logprobs
