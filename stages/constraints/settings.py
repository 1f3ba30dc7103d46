"""`constraint` of a domain (per_domain.<name>.environment.constraint in params.yaml)."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from stages.constraints.formula import SpecError, is_file, parse_spec, spec_text
from stages.constraints.grammar import EXTRA, GrammarRules
from stages.constraints.transcript import Transcripts
from stages.runtime.validation import Checked, refuse_idle, watched

Stage = Literal["curate", "rollout", "annotate", "rl", "evaluate"]
Rules = Transcripts | GrammarRules


class Constraint(Checked):
    """What the policy's turns must look like: docs/constraints.md."""

    model_config = ConfigDict(strict=False)

    kind: Literal["ltl", "regex", "json_schema", "grammar"] = "ltl"
    """ltl: a behaviour formula over named states; the others hold for each turn by itself (extra `constraints`)."""
    spec: str = "react"
    """ltl: a shipped specification (react, reflexion, pass, search_then_answer) or a file; regex: a regular expression of Rust;
    json_schema, grammar (Lark): a file. Files are below data/raw, where DVC tracks changes."""
    enforcement: Literal["mask", "rollback", "retry", "report_only"] = "mask"
    """mask: tokens that would violate are never drawn; rollback: they are drawn, taken back, and drawn anew among the valid
    states; retry: a turn that violates is drawn again; report_only: violations are counted."""
    apply: list[Stage] = ["curate", "rollout", "annotate", "rl", "evaluate"]
    """Stages that enforce it; curate rejects demonstrations that violate it. Violations are counted in all."""
    max_state_tokens: Annotated[int, Field(ge=1)] = 128
    """ltl: tokens of a state's content, after which another state or the turn's end is forced."""
    budget_exit: Literal["shortest_path", "truncate"] = "shortest_path"
    """ltl: shortest_path: where turns or tokens run short, only states remain that reach the end in time; truncate: episodes are
    cut by the limits."""
    values: dict[str, list[str]] = {}
    """ltl: closed lists of contents by state, such as {action: [search]}."""
    on_invalid_value: Literal["violation", "first_option", "error"] = "violation"
    """ltl, unless masked: a content outside a closed list counts as a violation; or the entry that resembles it is taken, the
    first if none does; or it is an error, which stops the stage."""
    retries: Annotated[int, Field(ge=1, le=100)] = 3
    """retry: draws of a turn at most."""
    terminate_on_restart: bool = True
    """ltl: the episode ends once the formula is fulfilled; false: the formula begins anew."""
    renormalise: bool = True
    """mask: log-probabilities are of the masked distribution and forced tokens are not trained, as they were drawn; false: of the
    policy without the mask, to measure what that costs."""
    penalty: Annotated[float, Field(ge=0.0)] = 0.0
    """Subtracted from the reward of the turn that violates."""

    @property
    def rules(self) -> Rules:
        """Raises SpecError for a specification that is missing or not valid."""
        values = tuple((name, tuple(listed)) for name, listed in sorted(self.values.items()))
        closest, restarts = self.on_invalid_value == "first_option", not self.terminate_on_restart
        return make_rules(self.kind, self.spec, values, closest, restarts)

    def enforces(self, stage: str) -> bool:
        """Whether the policy's sampling changes in a stage."""
        return stage in self.apply and self.enforcement != "report_only"

    @model_validator(mode="after")
    def _valid(self) -> Constraint:
        if lacking := lacks(self.kind):
            raise ValueError(f"{lacking}, or set kind to ltl")
        if is_file(self.kind, self.spec) and not watched(self.spec):
            raise ValueError(f"spec is {self.spec}; put the file below data/raw, where DVC tracks changes")
        if self.kind != "ltl" and self.values:
            raise ValueError(f"values has no effect with kind {self.kind}; remove it, or set kind to ltl")
        if self.kind != "ltl" and self.enforcement == "rollback":
            raise ValueError(f"enforcement rollback goes back to a state, which kind {self.kind} lacks; set it to mask or retry")
        formula = ("max_state_tokens", "budget_exit", "on_invalid_value", "terminate_on_restart")
        refuse_idle(
            *(self, ""),
            {
                **dict.fromkeys(formula, (self.kind == "ltl", "kind ltl")),
                "retries": (self.enforcement == "retry", "enforcement retry"),
                "renormalise": (self.enforcement == "mask", "enforcement mask"),
            },
        )
        if any(not listed for listed in self.values.values()):
            raise ValueError("values has an empty list, which allows nothing; list contents, or leave the state out")
        if self.enforcement in ("rollback", "retry") and "rl" in self.apply:
            raise ValueError(
                f"enforcement {self.enforcement} draws from a distribution whose log-probabilities are not known, which rl "
                f"needs; set enforcement to mask, or leave rl out of apply"
            )
        try:
            _ = self.rules
        except SpecError as error:
            raise ValueError(str(error)) from error
        return self


def lacks(kind: str) -> str | None:
    """What a kind needs that is not installed, and how to install it; None if it needs nothing more."""
    missing = kind != "ltl" and importlib.util.find_spec("llguidance") is None
    return f"kind {kind} needs llguidance, which is not installed: {EXTRA}" if missing else None


def make_rules(
    kind: str,
    spec: str,
    values: tuple[tuple[str, tuple[str, ...]], ...] = (),
    closest: bool = False,
    restarts: bool = False,
) -> Rules:
    """The rules of a specification; values, closest, restarts: of kind ltl, see `Transcripts`. A file is read anew each time, and
    parsed again if its text has changed. Raises SpecError."""
    if lacking := lacks(kind):
        raise SpecError(lacking)
    return _parsed(kind, spec, spec_text(kind, spec), values, closest, restarts)


@lru_cache(64)
def _parsed(
    kind: str, spec: str, text: str, values: tuple[tuple[str, tuple[str, ...]], ...], closest: bool, restarts: bool
) -> Rules:
    if kind == "ltl":
        return Transcripts(parse_spec(text, spec).with_values(dict(values)), closest, restarts)
    return GrammarRules(kind, spec, text)
