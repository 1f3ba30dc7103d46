"""Fits a generative verifier on pairs whose label is known: references of one task agree, answers to other tasks do not.

Su et al. (arXiv 2503.23829) distil their verifier from a larger judge's labels of episodes; here the labels follow from the
references (`labelled_pairs`), or are the environment's of recorded episodes (`logged_pairs`). A share of the wrong answers are
openers without content, which generative judges are known to accept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.judging.generative import GenerativeVerifier
from stages.seeding import stream

OPENERS = ("", "the answer is", "answer", "I will solve this step by step.")
OPENER_SHARE, HELD_OUT = 0.1, 0.2
"""Share of wrong answers that have no content; share of tasks that only measure. Our choices."""
FIT_BATCH = 16


@dataclass(frozen=True)
class Pair:
    """A question with a reference and an answer. `right`: whether they agree."""

    task_id: str
    question: str
    reference: str
    answer: str
    right: bool


def labelled_pairs(questions: Mapping[str, str], references: Mapping[str, Sequence[str]], seed: int) -> list[Pair]:
    """One right and one wrong pair for each reference of each task, in a fixed order. Tasks without references are left out; a
    wrong answer is never a reference of the task."""
    names = sorted(name for name in questions if references.get(name))
    found: list[Pair] = []
    for name in names:
        texts = references[name]
        rng = stream("verifier.pairs", seed, name)
        for text in texts:
            found.append(Pair(name, questions[name], text, rng.choice(list(texts)), True))
            others = [one for one in (references[rng.choice(names)][0] for _ in range(4)) if one not in texts]
            opener = not others or rng.random() < OPENER_SHARE
            wrong = rng.choice(OPENERS) if opener else others[0]
            found.append(Pair(name, questions[name], text, wrong, False))
    return found


def logged_pairs(
    questions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    answers: Mapping[str, Sequence[tuple[str, bool]]],
    seed: int,
) -> list[Pair]:
    """A pair for each recorded (answer, whether it is right) of a task with references, and for each task a reference as a right
    answer; and, for OPENER_SHARE of all, an opener without content as a wrong one. In a fixed order."""
    found: list[Pair] = []
    for name in sorted(name for name in questions if references.get(name)):
        texts, rng = list(references[name]), stream("verifier.logged", seed, name)
        rows = [*answers.get(name, ()), (rng.choice(texts), True)]
        for answer, right in rows:
            found.append(Pair(name, questions[name], rng.choice(texts), answer, right))
            if rng.random() < OPENER_SHARE:
                found.append(Pair(name, questions[name], rng.choice(texts), rng.choice(OPENERS), False))
    return found


def divided(pairs: Sequence[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """(pairs to fit, pairs of other tasks to measure)."""
    held = {name for name in {pair.task_id for pair in pairs} if stream("verifier.held_out", seed, name).random() < HELD_OUT}
    return [pair for pair in pairs if pair.task_id not in held], [pair for pair in pairs if pair.task_id in held]


def fit(verifier: GenerativeVerifier, pairs: Sequence[Pair], steps: int, rate: float, seed: int) -> list[float]:
    """Train the verifier's model in place on the labels' cross-entropy; the loss of each step. Raises ValueError without
    pairs."""
    import torch

    from stages.agent.logprobs import head_logprobs, hidden_states

    if not pairs:
        raise ValueError(
            "no task has references to fit the verifier on; set curate.expert_demonstrations, or rl.verifier.path to a model"
        )
    model = verifier.model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser, rng, losses = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0), stream("verifier.fit", seed), []
    device = next(model.parameters()).device
    for _ in range(steps):
        chosen = rng.choices(pairs, k=FIT_BATCH)
        rows = [verifier.prompt_tokens(pair.question, pair.reference, pair.answer) for pair in chosen]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        ends = torch.tensor([len(row) - 1 for row in rows], device=device)
        labels = torch.tensor([verifier.label_tokens[0 if pair.right else 1] for pair in chosen], device=device)
        hidden = hidden_states(model, ids)[torch.arange(len(rows), device=device), ends]
        loss = -head_logprobs(model, hidden, labels).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def measured(verifier: GenerativeVerifier, pairs: Sequence[Pair]) -> dict[str, float]:
    """Accuracy, and false-positive rate: the share of wrong pairs whose label "right" is the likelier of the two."""
    prompts = [verifier.prompt_tokens(pair.question, pair.reference, pair.answer) for pair in pairs]
    accepted = [right > wrong for right, wrong in verifier.probabilities(prompts)]
    correct = [said == pair.right for said, pair in zip(accepted, pairs, strict=True)]
    fooled = [said for said, pair in zip(accepted, pairs, strict=True) if not pair.right]
    return {
        "pairs": float(len(pairs)),
        "accuracy": sum(correct) / max(len(correct), 1),
        "false_positive_rate": sum(fooled) / max(len(fooled), 1),
    }
