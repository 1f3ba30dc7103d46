"""A team of agents (MARFT, arXiv 2504.16129): who plays, with which weights, and who is trained when. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.agent.team import Member, problem
from stages.algorithms.parts.part import AppliesTo, Part
from stages.runtime.validation import ParamsError, Share

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Team(Part):
    """Agents that play together, for advantage.estimator: team."""

    applies = AppliesTo("advantage.estimator", "team")

    members: list[Member] = []
    """In the order in which they speak; the text of the last one is the action."""
    weights: Literal["own", "shared"] = "own"
    """own: each member has weights, and an optimiser, of its own: with model.lora.rank above 0 an adapter on the shared base,
    else all weights. shared: all play and train the same ones."""
    credit: Literal["chain", "shared_last", "mean_mix"] = "chain"
    """chain: advantages go from each text to the one before it, whoever wrote that; shared_last: each member is credited alone,
    with the reward of the action that follows its text; mean_mix: alone, with half its own reward and half the members' mean."""
    token_gamma: Annotated[Share, AppliesTo("advantage.level", "token")] = 1.0
    """Discount from token to token within a text; advantage.gamma discounts from text to text."""
    interval: Annotated[int, Field(ge=0)] = 0
    """Agent by agent: so many steps train one member alone, the next ones the next; 0: all are trained in every step."""

    def check(self, rl: Rl, method: Composition) -> None:
        if rl.advantage.estimator != "team":
            return
        if not self.members:
            raise ParamsError("rl.advantage.estimator: team needs agents, and rl.team.members is empty: list them")
        if found := problem(self.members):
            raise ParamsError(f"rl.team.members {found}")
        if self.interval and len(self.members) == 1:
            raise ParamsError("rl.team.interval trains one member after the other, and rl.team.members has one: set it to 0")
        if rl.tasks.source != "static":
            raise ParamsError(
                f"rl.team plays tasks that curate wrote, and rl.tasks.source is {rl.tasks.source}; set it to static"
            )
        off = {
            "external.per_group": (rl.external.per_group > 0, "0"),
            "imitation.ratio": (rl.imitation.ratio > 0, "0"),
            "reannotate.every": (rl.reannotate.every > 0, "0"),
            "branching.kind": (rl.branching.kind != "none", "none"),
            "group_resampling.kind": (rl.group_resampling.kind != "none", "none"),
            "cost.kind": (rl.cost.kind != "none", "none"),
            "credit.kind": (rl.credit.kind != "outcome", "outcome"),
            "reward": (not rl.reward.environments_own, "the environment's own"),
            "reward.kl_coef": (rl.reward.kl_coef > 0, "0, and loss.kl_coef above 0"),
            "observation.coef": (rl.observation.coef > 0, "0"),  # what a member reads are the others' texts, too
        }
        if used := next((key for key, (holds, _) in off.items() if holds), None):
            raise ParamsError(
                f"rl.{used} is about the episodes of one agent, and rl.team credits those of several together; set it to "
                f"{off[used][1]}"
            )

    def learns(self, step: int, level: str | None) -> list[str]:
        """Roles that step `step`, from 0, trains. With an interval k the slice s = step // k trains member s mod n at the level
        of turns, (s + 1) mod n at that of tokens."""
        roles = [member.role for member in self.members]
        if not self.interval:
            return roles
        return [roles[(step // self.interval + (level == "token")) % len(roles)]]
