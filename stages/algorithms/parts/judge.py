"""Rewards by a judge (`rl.reward.kind: judge`): who judges, what it compares, and how that becomes a group's rewards.

stages/judging has the judges, the tournaments and their measures; stages/training/rl/judging.py asks them. Light to import.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.parts.part import AppliesIf, AppliesTo, Part
from stages.judging.contract import Rubric
from stages.judging.settings import (
    Extraction,
    LabelledPairs,
    LengthBonus,
    LocalParams,
    ProgramFaults,
    SampledPrinciples,
    ServerParams,
)
from stages.runtime.validation import Count, NonNegative, ParamsError, Positive, Share

if TYPE_CHECKING:
    from collections.abc import Callable

    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl
    from stages.judging.groups import Scoring
    from stages.judging.settings import JudgeModel

ELIMINATION = ("seeded_single_elimination", "unseeded_single_elimination", "double_elimination")
TOURNAMENTS = ("anchor", "round_robin", *ELIMINATION, "swiss")
ANCHORED = ("anchor", "seeded_single_elimination")
PLAYED = AppliesTo("scheme", *TOURNAMENTS)
CRITERIA = AppliesIf(lambda rl: rl.judge.scheme != "checklist", "judge.scheme other than checklist")
WEIGHED = AppliesIf(lambda rl: rl.judge.kind != "local", "a judge.kind that scores by criteria, program or server")
NAMED = AppliesIf(
    lambda rl: rl.judge.kind != "local" or (rl.judge.scheme == "pointwise" and rl.judge.principles is None),
    "a judge that reads criteria: judge.kind program or server, or judge.scheme pointwise without judge.principles",
)
REPEATED = AppliesIf(
    lambda rl: rl.judge.kind != "local", "a judge.kind whose answers to a repeated question differ, program or server"
)
READS = AppliesIf(lambda rl: rl.judge.kind != "program", "a judge.kind that reads text, server or local")
POINTWISE = AppliesTo("scheme", "pointwise")
READING = AppliesIf(
    lambda rl: rl.judge.kind == "local" and rl.judge.scheme == "pointwise", "judge.kind: local with judge.scheme: pointwise"
)
PROCESS = ["breadth", "relevance", "detail"]
ANSWER = list(Rubric().answer)


class Judge(Part):
    """Who judges the episodes, and how judgments become rewards."""

    data = ("episodes",)
    applies = AppliesTo("reward.kind", "judge")

    kind: Literal["program", "server", "local"] = "program"
    """program: perceives the domain's hidden quality (without one, the return) with planted errors, for tests and experiments;
    server: an OpenAI-compatible server; local: a model of this repository."""
    scheme: Literal[
        "pointwise",
        "checklist",
        "anchor",
        "round_robin",
        "seeded_single_elimination",
        "unseeded_single_elimination",
        "double_elimination",
        "swiss",
    ] = "pointwise"
    """pointwise and checklist score each episode on its own; the others compare a group's episodes in a tournament."""
    reward: Annotated[Literal["rank", "bradley_terry", "thurstone", "score"], PLAYED] = "rank"
    """Of a tournament: by order of finish, in [0, 1]; Bradley-Terry or Thurstone strengths, a tie being half a win; or mean
    scores."""
    ridge: Annotated[Positive, AppliesTo("reward", "bradley_terry", "thurstone")] = 0.1
    """bradley_terry, thurstone: precision of the strengths' normal prior."""
    anchor: Annotated[Literal["first", "greedy"], AppliesTo("scheme", *ANCHORED)] = "first"
    """Whom all others meet: the group's first episode; or a greedy episode of the task, which is ranked but not trained on."""
    tie_policy: Annotated[Literal["higher_seed", "split_rank", "first_listed"], AppliesTo("scheme", *ELIMINATION, "swiss")] = (
        "higher_seed"
    )
    """Who advances from a tie. split_rank: the higher seed, and the two share the mean of their rewards, so that a group without
    differences has no advantages; first_listed: the reference code's. swiss, where nobody advances: under split_rank who is left
    out of a round draws, otherwise it wins."""
    byes: Annotated[Literal["top_seeds", "reference"], AppliesTo("scheme", *ELIMINATION[:2])] = "top_seeds"
    """Who advances without a match if the group's size is no power of two; reference: as in the authors' code."""
    swiss_rounds: Annotated[Count | None, AppliesTo("scheme", "swiss")] = None
    """null: min(ceil(log2 N), N - 1)."""
    swap: Annotated[bool, PLAYED] = True
    """Judge each pair in both orders, which cancels an additive bias for a position."""
    calls_per_group: Annotated[Count | None, REPEATED] = None
    """Judge calls per group; more than the scheme needs repeat each question, and scores are averaged. null: as few as needed."""
    on_failure: Literal["tie", "drop_match", "abort"] = "tie"
    """What a failed judgment is worth. tie: half the scale for all; drop_match: nothing: a match does not count (eliminations and
    Swiss, which need a result, take a tie), and a single score is the mean of the group's others; abort: the end of the run."""
    process_weight: Annotated[Share, CRITERIA, WEIGHED] = 0.0
    """Weight of the criteria on the steps; episodes of one turn have none."""
    process: Annotated[
        Annotated[list[str], Field(min_length=1)],
        AppliesIf(lambda rl: rl.judge.process_weight > 0, "a judge.process_weight above 0"),
        WEIGHED,
    ] = PROCESS
    """Criteria on the steps."""
    criteria: Annotated[Annotated[list[str], Field(min_length=1)], CRITERIA, NAMED] = ANSWER
    """Criteria on the answer."""
    items: Annotated[Annotated[list[str], Field(min_length=1)] | None, AppliesTo("scheme", "checklist")] = None
    """checklist: what is checked; the reward is the share that is met. null: the domain's own checklist of each task, which is
    the one that a program judge knows."""
    principles: Annotated[SampledPrinciples | None, CRITERIA] = None
    """Principles that the judge reads, drawn anew for each group ({}: with defaults); a program judge adds up the attributes that
    they name. null: none."""
    extract: Extraction | None = None
    """What the judge reads of a last message with thoughts. null: the action, of episodes that the environment ended."""
    raw: Annotated[bool, READING] = False
    """The reward is the log-odds of the model's options, as of a reward model, instead of a probability on the rubric's scale."""
    scale: Annotated[Positive, POINTWISE] = 1.0
    """pointwise: factor on the reward, after the two terms below."""
    length_bonus: Annotated[LengthBonus | None, POINTWISE] = None
    """pointwise: a bonus for long answers ({}: the paper's), or with a rate below 0 for short ones. null: none."""
    unfinished_penalty: Annotated[NonNegative, POINTWISE] = 0.0
    """pointwise: subtracted from the reward of an episode whose last turn the policy did not end."""
    references: Annotated[bool, READS] = False
    """Show the judge the domain's reference answer, where it has one."""
    labelled_pairs: LabelledPairs | None = None
    """Labelled pairs on which the judge is measured before it is believed. null: none."""
    warn_gap: Positive | None = 1.0
    """Warn when judge and gold quality have moved apart by this much, in standard deviations of the first step (mean of 5 steps);
    the gold is the domain's hidden quality, or the return. null: never."""
    stop_gap: Positive | None = None
    """End the training at this gap. null: never."""
    program: Annotated[ProgramFaults, AppliesTo("kind", "program")] = ProgramFaults()
    server: Annotated[ServerParams, AppliesTo("kind", "server")] = ServerParams()
    local: Annotated[LocalParams, AppliesTo("kind", "local")] = LocalParams()

    @property
    def anchored_by_greedy(self) -> bool:
        """Whether a greedy episode takes part in each group's tournament."""
        return self.anchor == "greedy" and self.scheme in ANCHORED

    def check(self, rl: Rl, method: Composition) -> None:
        if rl.reward.kind != "judge":
            return
        if self.kind == "server" and not self.server.model:
            raise ParamsError("rl.judge.kind: server needs the judge's name at the server: set rl.judge.server.model")
        if self.scheme == "checklist" and self.kind == "program" and self.items is not None:
            raise ParamsError(
                "rl.judge.items are words, and a program knows only the domain's own checklist: set items to null, or kind to "
                "server or local"
            )
        for name in ("process", "criteria", "items"):
            given = getattr(self, name) or []
            if twice := [one for one in given if given.count(one) > 1]:
                raise ParamsError(f"rl.judge.{name} has {twice[0]!r} twice; name each once")
        if self.labelled_pairs is not None and self.kind == "program":
            raise ParamsError(
                "rl.judge.labelled_pairs is for judges that read text, and rl.judge.kind is program: set it to null"
            )
        if self.labelled_pairs is not None and self.scheme == "checklist" and self.items is None:
            raise ParamsError(
                "rl.judge.labelled_pairs belong to no task of the domain, and rl.judge.items is null, which takes each task's "
                "own checklist: set items in words, or labelled_pairs to null"
            )
        size = rl.group_size + self.anchored_by_greedy
        if self.scheme in TOURNAMENTS and size < 2:
            raise ParamsError(f"rl.judge.scheme: {self.scheme} compares the episodes of a group; set rl.group_size to 2 or more")
        if rl.advantage.mean == "greedy":
            raise ParamsError(
                "rl.advantage.mean: greedy is the return of an episode that no group's judgment covers; set it to group, or "
                "rl.reward.kind to environment"
            )
        try:
            self.scoring().repeats(size)
        except ValueError as error:
            raise ParamsError(str(error)) from error

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        if rl.reward.kind != "judge":
            return
        if self.extract is not None and self.extract.marker is None and section("model").thinking is None:
            yield (
                "rl.judge.extract finds responses after the end of a thought, and model.thinking is null: set that to {}, or "
                'rl.judge.extract.marker to the marker of responses ("": there are no thoughts)'
            )
        if self.kind != "local":
            return
        if self.local.path.startswith("hub:"):
            yield f"rl.judge.local.path is {self.local.path}; download the model first, and set it to its folder"
        if self.local.path:
            return
        yield from self._unlike_fitted(section("annotate").judge_model)

    def _unlike_fitted(self, fitted: JudgeModel) -> Iterator[str]:
        """Why annotate's judge model can't be asked so: it must read what it learnt to read."""
        wanted = "comparison" if self.scheme in TOURNAMENTS else "reward"
        if fitted.kind != wanted:
            yield (
                f"rl.judge.kind: local with scheme {self.scheme} needs a judge model, and annotate.judge_model.kind is "
                f"{fitted.kind}: set that to {wanted}, or rl.judge.local.path to a folder"
            )
        elif fitted.options != self.local.options:
            yield (
                f"rl.judge.local.options are {self.local.options}, and annotate.judge_model learnt to answer {fitted.options}; "
                f"make them equal"
            )
        elif self.scheme == "checklist":
            yield (
                "rl.judge.scheme: checklist asks about items, and annotate.judge_model learnt to score whole answers: set scheme "
                "to pointwise, or rl.judge.local.path to a model that reads items"
            )
        elif self.principles is None and fitted.principles is not None:
            yield (
                "rl.judge.principles is null, and annotate.judge_model learnt to judge by principles alone: set "
                "rl.judge.principles to {}, or annotate.judge_model.principles to null"
            )
        elif self.principles is not None and fitted.principles is None:
            yield (
                "rl.judge.principles are read by a model that learnt from principles, and annotate.judge_model.principles is "
                "null: set it to {}, or choose an rl.algorithm without principles"
            )
        elif self.criteria != ANSWER:
            yield (
                f"rl.judge.criteria are {self.criteria}, and annotate.judge_model learnt {ANSWER}: set criteria to null, or "
                f"rl.judge.local.path to a model that reads others"
            )
        elif self.references:
            yield (
                "rl.judge.references shows a reference, and annotate.judge_model learnt without one: set it to false, or "
                "rl.judge.local.path to a model that reads references"
            )

    def scoring(self) -> Scoring:
        """How groups are scored."""
        from stages.judging.groups import Scoring
        from stages.judging.tournaments import Rules

        rubric = Rubric(tuple(self.process), tuple(self.criteria), tuple(self.items or ()), self.process_weight)
        rules = Rules(self.tie_policy, self.byes, self.swiss_rounds)
        return Scoring(self.scheme, rules, self.reward, self.ridge, self.swap, self.on_failure, self.calls_per_group, rubric)
