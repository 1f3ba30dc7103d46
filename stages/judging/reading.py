"""Opens the judge of section rl.judge that reads texts: a server, or a local model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from stages.judging.contract import Judge
from stages.judging.server import ServerJudge
from stages.judging.settings import LocalParams, ServerParams

FOLDER = "judge_model"
"""In data/annotated/<domain>: the model that annotate fits."""


class Reading(Protocol):
    """Of section rl.judge: what is needed of a judge that reads."""

    @property
    def kind(self) -> str: ...
    @property
    def server(self) -> ServerParams: ...
    @property
    def local(self) -> LocalParams: ...
    @property
    def raw(self) -> bool: ...


def reading_judge(params: Reading, domain: str, root: Path, device: str, max_length: int) -> Judge:
    """The judge of `kind` server or local, as rl uses it. Raises FileNotFoundError or PolicyError without a local model."""
    if params.kind == "server":
        return ServerJudge(params.server, root)
    from stages.agent.policy import load_policy
    from stages.judging.local import LocalJudge

    policy = load_policy(root / (params.local.path or f"data/annotated/{domain}/{FOLDER}"), device=device)
    policy.model.eval()
    return LocalJudge(policy, params.local, max_length, params.raw)
