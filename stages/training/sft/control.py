"""Utility control: fine-tuning a model's choices to those of an assembly (Mazeika et al., arXiv 2502.08640).

    soft      L_q = -[a_q log pi(A | q) + (1 - a_q) log pi(B | q)],  pi renormalised over the two options, in both orders
    sampled   the same with a_q drawn as 0 or 1;  majority  with a_q rounded

a_q is the share of the assembly's members that choose A: member k has utilities u_k = u + spread * N(0, 1) of the outcomes.

The questions alone would make a small model forget what the demonstrations taught it. So each question, in each order, comes with
one of them, whose mean negative log-probability per token, times `rehearsal`, is added to L_q. It counts towards `batch_tokens`,
also if `rehearsal` is 0, so that the weight changes no batches. The paper does not say how it keeps the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stages.agent.policy import Policy
from stages.judging.active_pairs import all_pairs
from stages.judging.chooser import Chooser
from stages.judging.utility_settings import Control
from stages.seeding import permutation, stream

if TYPE_CHECKING:
    from torch import Tensor

    from stages.training.common.documents import Documents

SECTION = "sft.control"


@dataclass(frozen=True)
class Choice:
    """Tokens of a question in one order, the share of the first option to learn, and the demonstration to rehearse, by its number
    and its length; None: none."""

    task_id: str
    token_ids: list[int]
    share: float
    demonstration: tuple[int, int] | None = None

    rows = 1

    @property
    def width(self) -> int:
        return len(self.token_ids) + (self.demonstration[1] if self.demonstration else 0)


def soft_losses(logits: Tensor, shares: Tensor) -> Tensor:
    """L_q [B] of the two options' logits [B, 2] and shares [B]."""
    log = logits.log_softmax(-1)
    return -(shares * log[:, 0] + (1 - shares) * log[:, 1])


def assembly_shares(params: Control, seed: int) -> dict[tuple[int, int], float]:
    """(i, j) -> share of the members that prefer outcome i, ties half."""
    rng = stream("control.assembly", seed)
    means = list(params.outcomes.values())
    members = [[mean + params.spread * rng.gauss(0.0, 1.0) for mean in means] for _ in range(params.members)]
    return {
        (i, j): sum((one[i] > one[j]) + 0.5 * (one[i] == one[j]) for one in members) / len(members)
        for i, j in all_pairs(len(means))
    }


def target(share: float, kind: str, seed: int, *key: object) -> float:
    """What is learnt of an assembly's share."""
    if kind == "sampled":
        return float(stream("control.sampled", seed, *key).random() < share)
    return float(round(share)) if kind == "majority" and share != 0.5 else share


def agreement(chooser: Chooser, outcomes: Sequence[str], shares: dict[tuple[int, int], float]) -> float:
    """Share of pairs whose choice, averaged over both orders, is the assembly's majority; pairs that divide it are left out."""
    pairs = [pair for pair, share in sorted(shares.items()) if share != 0.5]
    texts = [(outcomes[i], outcomes[j]) for i, j in pairs]
    asked = chooser.probabilities([*texts, *((other, one) for one, other in texts)])
    right = 0
    for place, pair in enumerate(pairs):
        (first, second), (turned_first, turned_second) = asked[place], asked[len(pairs) + place]
        right += (first + turned_second > second + turned_first) == (shares[pair] > 0.5)
    return right / max(1, len(pairs))


def rehearsed(choices: Sequence[Choice], demonstrations: Documents, seed: int) -> list[Choice]:
    """The choices, each with one of the demonstrations, which are used in turn in a random order."""
    order = permutation(range(demonstrations.size), "control.rehearsal", seed)
    numbers = [order[place % len(order)] for place in range(len(choices))]
    return [
        replace(choice, demonstration=(number, demonstrations.lengths[number]))
        for choice, number in zip(choices, numbers, strict=True)
    ]


def questions_of(
    params: Control, chooser: Chooser, shares: dict[tuple[int, int], float], pairs: Sequence[tuple[int, int]], seed: int
) -> list[Choice]:
    """What is learnt of `pairs`, each in both orders."""
    outcomes, found = list(params.outcomes), []
    for i, j in pairs:
        learnt = target(shares[i, j], params.kind, seed, i, j)
        for one, other, share in ((i, j, learnt), (j, i, 1 - learnt)):
            found.append(Choice(f"{i}-{j}", chooser.prompt_tokens(outcomes[one], outcomes[other]), share))
    return found


def control(
    policy: Policy, params: Control, demonstrations: Documents | None, max_length: int, seed: int, micro_tokens: int
) -> dict[str, float]:
    """Train the policy's model in place. Returns, before and after, agreement with the assembly on held-out pairs, and the mean
    of L_q on the pairs that are learnt. demonstrations: to rehearse; None: none."""
    import torch

    from stages.agent.logprobs import token_logprobs
    from stages.agent.shared_prefixes import fastest_states
    from stages.values import fitting

    shares = assembly_shares(params, seed)
    chosen = permutation(sorted(shares), "control.pairs", seed)
    held = chosen[: max(1, round(params.valid_share * len(chosen)))]
    known = chosen[len(held) :][: params.questions]
    chooser = Chooser(policy, params.question, params.options, max_length, SECTION)
    examples, states = questions_of(params, chooser, shares, known, seed), fastest_states(policy.model)
    if demonstrations is not None:
        examples = rehearsed(examples, demonstrations, seed)

    def question_loss(run: Sequence[Choice]) -> Tensor:
        logits = chooser.logits([one.token_ids for one in run])[:, chooser.option_tokens]
        return soft_losses(logits, torch.tensor([one.share for one in run], device=logits.device)).sum()

    def loss(run: Sequence[Choice]) -> Tensor:
        rows = [one.demonstration[0] for one in run if one.demonstration]
        if demonstrations is None or not params.rehearsal:
            return question_loss(run)
        token_ids, mask = demonstrations.take(rows, policy.model.device)
        logprobs = token_logprobs(policy.model, token_ids, mask, states=states)
        return question_loss(run) - params.rehearsal * (logprobs.sum(1) / mask.sum(1)).sum()

    def measure(when: str) -> dict[str, float]:
        measuring = {pair: shares[pair] for pair in held}
        with torch.no_grad():
            total = sum(float(question_loss(run)) for run in fitting.token_batches(examples, micro_tokens))
        agreed = agreement(chooser, list(params.outcomes), measuring)
        return {f"agreement_{when}": agreed, f"loss_{when}": total / len(examples)}

    before, training = measure("before"), policy.model.training
    policy.model.train()
    fitting.fit(policy.model, examples, loss, lambda one: 1.0, params, micro_tokens, seed, "control")
    policy.model.eval()
    after = measure("after")
    policy.model.train(training)
    return {"questions": float(len(known)), "held_out": float(len(held)), **before, **after}
