"""What params.yaml says of reward shaping in lists, whose entries need not give every key: defaults apply."""

from __future__ import annotations

from stages.runtime.validation import NonNegative, Section, Share


class PrsStage(Section):
    """One stage of progressive reward shaping: reached once all stages before it have met their thresholds."""

    name: str
    """Of the stage, and of the term it scores unless `term` is given."""
    weight: NonNegative
    """Of the stage's score in the reward."""
    threshold: Share = 1.0
    """Score from which the next stage counts."""
    term: str | None = None
    """What is scored: `parse` (share of accepted actions; 0 if the episode ran out of tokens), `tool` (1 if a tool was called),
    `outcome` (the environment's return) or a reward term that the environment reports. null: the stage's name."""
    no_call_score: Share = 1.0
    """`tool`: the score of an episode without a call."""
