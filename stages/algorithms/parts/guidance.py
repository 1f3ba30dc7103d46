"""The guided pass (Agent-RLVR, arXiv 2506.11425): further attempts, with a hint, at tasks in which a plain attempt failed.

stages/training/rl/guided_pass.py plays it before the first training step; hints never reach a training sequence. Light to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from stages.agent.guidance import KINDS, Kind
from stages.algorithms.parts.part import AppliesIf, AppliesTo, Part
from stages.judging.chat_settings import ChatParams
from stages.runtime.validation import Count, ParamsError

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


def reads_guided(rl: Rl) -> bool:
    """Whether the resolved section asks for guided attempts."""
    return rl.preference.source == "guided" or bool(getattr(rl.settings, "guided", False))


def plays_guided(rl: Rl) -> bool:
    """Whether there is a guided pass."""
    return reads_guided(rl) and bool(rl.guidance.kinds)


class Guidance(Part):
    """Hints for a second attempt at tasks that the SFT policy failed."""

    switch, data = "source", ("pairs", "attempts")
    applies = AppliesIf(reads_guided, "preference.source: guided, or rejection_sft with settings.guided: true")

    kinds: list[Kind] = list(KINDS)
    """Which hints are given, in turn: the order of the solution's steps (plan), what a failed attempt got wrong (env_feedback),
    where to act next (env_interaction). []: no guided attempts."""
    source: Literal["oracle", "mcts", "server"] = "oracle"
    """Who teaches. oracle: rules on the expert's demonstrations; mcts: the same rules on the correct and failed paths of
    annotate's trees; server: a model behind an OpenAI-compatible server, which reads the demonstration and the failed attempt."""
    attempts: Count = 4
    """Guided attempts at each task with a failed plain attempt. The failed attempts and kinds take turns."""
    max_tokens: Count = 64
    """Hints of more tokens are not used."""
    forbid_answer: bool = True
    """Hints that contain an answer that the task accepts, or the solution's (in domains without answers, its last action), are
    not used."""
    drop_mentions: list[str] = ["hint", "guidance"]
    """A guided success whose turns, thoughts included, contain one of these words, or quote the hint, is not learned from."""
    server: Annotated[ChatParams, AppliesTo("source", "server")] = ChatParams()

    def check(self, rl: Rl, method: Composition) -> None:
        if len(set(self.kinds)) != len(self.kinds):
            raise ParamsError(f"rl.guidance.kinds lists one twice: {self.kinds}; list each once")
        if plays_guided(rl) and self.source == "server" and not self.server.model:
            raise ParamsError("rl.guidance.source is server, and rl.guidance.server.model is empty: name the model at the server")

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        if not plays_guided(rl) or method.data not in self.data:
            return
        curate = section("curate")
        if self.source != "mcts" and not curate.expert_demonstrations and not curate.imports:
            yield (
                f"rl.guidance.source: {self.source} makes hints from demonstrations, and curate.expert_demonstrations is 0: set "
                f"it to 1, or source to mcts"
            )
