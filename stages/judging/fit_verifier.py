"""Fits a generative verifier on pairs whose label is known: references of one task agree, answers to other tasks do not.

Su et al. (arXiv 2503.23829) distil their verifier from a larger judge's labels of episodes; here the labels follow from the
references (`labelled_pairs`), or are the environment's of recorded episodes (`logged_pairs`). Wrong answers read like right ones:
they are references too, of other tasks or with a word or two changed, so that neither a wording nor the task's name gives the
label away. A share of them has no content (`Contentless`), which generative judges are known to accept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from stages.judging.generative import GenerativeVerifier
from stages.seeding import stream

OPENERS = ("", "the answer is", "answer", "I will solve this step by step.")
OPENER_SHARE, HARD_SHARE, HELD_OUT = 0.1, 0.5, 0.2
"""Shares of wrong answers that have no content, and of the others that are nearly right; share of tasks that only measure. Our
choices."""
FIT_BATCH = 16
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Pair:
    """A question with a reference and an answer. `right`: whether they agree."""

    task_id: str
    question: str
    reference: str
    answer: str
    right: bool


class Contentless:
    """Answers without content: openers, the question again, and a reference without the words that only some tasks have. A word
    belongs to the wording if at least half of the tasks have it in a reference."""

    def __init__(self, questions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> None:
        self.questions, self.references = questions, references
        known = [texts for texts in references.values() if texts]
        counts = Counter(word for texts in known for word in {one for text in texts for one in _WORD.findall(text.lower())})
        self.wording = {word for word, count in counts.items() if 2 * count >= len(known) > 1}

    def draw(self, name: str, rng: Random) -> str:
        """For a task; never one of its references."""
        empty = " ".join(_WORD.sub(self._kept, rng.choice(list(self.references[name]))).split())
        choices = [*OPENERS, self.questions[name], empty]
        return rng.choice([one for one in choices if one not in self.references[name]])

    def _kept(self, word: re.Match[str]) -> str:
        return word[0] if word[0].lower() in self.wording else ""


def swapped(text: str, other: str, rng: Random) -> str:
    """`text` with one word replaced by the word of another task's answer in the same place, if there is one that differs. Of
    answers in the same wording, such words are names and values."""
    theirs = _WORD.findall(other)
    places = [
        (word.span(), instead)
        for word, instead in zip(_WORD.finditer(text), theirs, strict=False)
        if word[0].lower() != instead.lower()
    ]
    if not places:
        return text
    (start, end), instead = rng.choice(places)
    return text[:start] + instead + text[end:]


def _nearly_right(texts: Sequence[str], elsewhere: Sequence[Sequence[str]], known: Sequence[str], rng: Random) -> list[str]:
    """One of the answers that are `known` to be wrong, or a reference with a word of those `elsewhere`, in the same wording where
    tasks list their references in the same order."""
    if known and rng.random() < HARD_SHARE:
        return [rng.choice(list(known))]
    place = rng.randrange(len(texts))
    return [swapped(texts[place], theirs[min(place, len(theirs) - 1)], rng) for theirs in elsewhere]


def labelled_pairs(
    questions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    seed: int,
    wrong: Mapping[str, Sequence[str]] | None = None,
) -> list[Pair]:
    """One right and one wrong pair for each reference of each task, in a fixed order. Tasks without references are left out; a
    wrong answer is never a reference of the task.

    wrong: task -> answers that a domain knows to be wrong though they read like its references. They are half of the nearly right
    answers; the others are references with a word of another task's (`swapped`)."""
    names = sorted(name for name in questions if references.get(name))
    empty, found = Contentless(questions, references), list[Pair]()
    for name in names:
        texts = list(references[name])
        rng = stream("verifier.pairs", seed, name)
        for text in texts:
            found.append(Pair(name, questions[name], text, rng.choice(texts), True))
            elsewhere = [list(references[rng.choice(names)]) for _ in range(4)]
            others = [rng.choice(theirs) for theirs in elsewhere]
            if rng.random() < HARD_SHARE:
                others = [*_nearly_right(texts, elsewhere, list((wrong or {}).get(name, ())), rng), *others]
            others = [one for one in others if one not in texts]
            opener = not others or rng.random() < OPENER_SHARE
            found.append(Pair(name, questions[name], text, empty.draw(name, rng) if opener else others[0], False))
    return found


def logged_pairs(
    questions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    answers: Mapping[str, Sequence[tuple[str, bool]]],
    seed: int,
) -> list[Pair]:
    """A pair for each recorded (answer, whether it is right) of a task with references, and for each task a reference as a right
    answer; and, for OPENER_SHARE of all, an answer without content as a wrong one. In a fixed order."""
    empty, found = Contentless(questions, references), list[Pair]()
    for name in sorted(name for name in questions if references.get(name)):
        texts, rng = list(references[name]), stream("verifier.logged", seed, name)
        rows = [*answers.get(name, ()), (rng.choice(texts), True)]
        for answer, right in rows:
            found.append(Pair(name, questions[name], rng.choice(texts), answer, right))
            if rng.random() < OPENER_SHARE:
                found.append(Pair(name, questions[name], rng.choice(texts), empty.draw(name, rng), False))
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
    accepted = [right > wrong for right, wrong in verifier.logprobs(prompts)]
    correct = [said == pair.right for said, pair in zip(accepted, pairs, strict=True)]
    fooled = [said for said, pair in zip(accepted, pairs, strict=True) if not pair.right]
    return {
        "pairs": float(len(pairs)),
        "accuracy": sum(correct) / max(len(correct), 1),
        "false_positive_rate": sum(fooled) / max(len(fooled), 1),
    }
