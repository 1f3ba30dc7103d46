"""Rewards by a verifier that compares answers with references (`rl.reward.kind: verifier`). stages/judging/verification.py has
the formulas. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.parts.part import AppliesIf, AppliesTo, Part
from stages.runtime.validation import Count, ParamsError, Positive, Share

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl

GENERATIVE = AppliesTo("kind", "generative")
FITTED = AppliesIf(lambda rl: rl.verifier.kind == "generative" and not rl.verifier.path, "an empty verifier.path")


FIT_SHARE = 0.25
"""Of the training tasks; our choice. The paper's verifier never sees the prompts of its later training either."""


class Verifier(Part):
    """Who compares an answer with a reference, and how that becomes a reward. References are the domain's, or else the answers of
    the training demonstrations; of a task's references every kind reads the same one, drawn by the seed."""

    data = ("episodes",)
    applies = AppliesTo("reward.kind", "verifier")

    kind: Literal["generative", "contains", "jaccard"] = "generative"
    """generative: a model that says right or wrong; contains: 1 if the reference's words occur in the answer; jaccard: the
    overlap of their words."""
    path: Annotated[str, GENERATIVE] = ""
    """Folder of the verifier's model, relative to the repository. "": a copy of the SFT policy, fitted when rl starts."""
    fit_on: Annotated[Literal["references", "rollouts"], FITTED] = "references"
    """What it is fitted on. references: they are right; those of other tasks, and some with a change, wrong; rollouts: the
    answers of the stage rollout too, labelled by the environment's success, as the paper labels what its policy explored."""
    fit_share: Annotated[float, Field(ge=0.0, lt=0.9)] | None = None
    """Share of the training tasks that are left to fitting it: rl trains on the others, on which the fit is measured. 0: it is
    fitted on the tasks that rl trains on. Rules leave out these tasks, too, if this is set, so that arms of a comparison have the
    same. null: 0.25 where a verifier is fitted, else 0."""
    fit_steps: Annotated[Count, FITTED] = 150
    """Steps of this fit."""
    fit_rate: Annotated[Positive, FITTED] = 1e-3
    """AdamW's learning rate in it."""
    score: Annotated[Literal["soft", "binary"], GENERATIVE] = "soft"
    """soft: the probability of right, or 1 less that of wrong; binary: the label that is drawn."""
    labels: Annotated[Annotated[list[str], Field(min_length=2, max_length=2)], GENERATIVE] = ["A", "B"]
    """What the model answers for right and for wrong; each one token after the prompt."""
    renormalise: Annotated[bool, GENERATIVE] = False
    """Divide both labels' probabilities by their sum."""
    other: Annotated[Share, GENERATIVE] = 0.0
    """Score where the verifier draws neither label."""
    read: Literal["last_line", "answer"] = "last_line"
    """What of the final action is compared: its last line that is not blank, or all of it."""
    most_words: Annotated[Count | None, AppliesTo("kind", "contains")] = None
    """contains: longer answers are wrong, which bounds lists of candidates. null: no bound."""
    warn_gap: Positive | None = 1.0
    """Warn when scores and gold quality have moved apart by this much; as judge.warn_gap. null: never."""
    stop_gap: Positive | None = None
    """End the training at this gap. null: never."""
    normalise: Literal["batch", "none"] = "batch"
    """batch: rewards of a step are (r - mean) / standard deviation (divisor n) over all its episodes, 0 where all are equal."""

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        verifier = values["verifier"]
        if verifier["fit_share"] is None and values["reward"]["kind"] == "verifier":
            verifier["fit_share"] = FIT_SHARE if verifier["kind"] == "generative" and not verifier["path"] else 0.0

    def check(self, rl: Rl, method: Composition) -> None:
        if rl.reward.kind != "verifier":
            return
        advantage = rl.advantage
        again = {
            "mean: batch": advantage.mean == "batch",
            f"std: {advantage.std}": advantage.std != "none",
            "whiten: true": advantage.whiten,
        }
        if self.normalise == "batch" and (named := [key for key, normalises in again.items() if normalises]):
            raise ParamsError(
                f"rl.verifier.normalise: batch has already centred and scaled what rl.advantage ({', '.join(named)}) would "
                f"normalise again; set normalise to none, or mean and std to none and whiten to false"
            )
        if rl.advantage.mean == "greedy":
            raise ParamsError(
                "rl.advantage.mean: greedy is the return of an episode that is not verified; set it to another baseline, or "
                "rl.reward.kind to environment"
            )
