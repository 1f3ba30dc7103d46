"""Who makes the hints of the guided pass: rules on demonstrations or on search trees, or a chat model behind a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.agent.guidance import Kind, hint_of
from stages.agent.prompts import load_prompt, transcript
from stages.annotation.correct_paths import correct_episodes, failed_episodes
from stages.judging.chat_server import ChatServer
from stages.records.episode import Episode, TurnRecord, read_episodes, read_rows

TREE_FAILURES = 4
"""Failed paths of each tree that feedback is about, in turn."""
PROMPT = "teacher.txt"
"""Of data/raw/prompts."""
ASKS: Mapping[Kind, str] = {
    "plan": "The hint is a plan: which steps to take, in which order.",
    "env_feedback": "The hint says what the failed attempt got wrong, and how to correct it.",
    "env_interaction": "The hint says where to look or act next.",
}


@dataclass(frozen=True)
class HintRequest:
    """One hint to make: `failed` is a plain attempt that failed, the `number`-th of its task."""

    task_id: str
    attempt: int
    kind: Kind
    failed: Episode
    number: int


@dataclass(frozen=True)
class Solutions:
    """Task -> the actions of its solution, and (from trees) its failed paths, shortest first."""

    of: Mapping[str, Sequence[TurnRecord]]
    failed: Mapping[str, Sequence[Episode]]


def read_solutions(source: str, curated: Path, annotated: Path, domain: str) -> Solutions:
    """The solutions with the fewest turns. source mcts: of annotate's trees; any other: of curate's demonstrations that
    succeeded. Raises ValueError if there is none."""
    failed: dict[str, list[Episode]] = {}
    if source == "mcts":
        rows = read_rows(annotated / "nodes.parquet")
        found, more = correct_episodes(rows, 1, domain), "raise annotate.tasks or annotate.iterations"
        for episode in failed_episodes(rows, TREE_FAILURES, domain):
            failed.setdefault(episode.task_id, []).append(episode)
    else:
        found = [one for one in read_episodes(curated / "demonstrations.parquet") if one.success]
        more = "raise curate.expert_demonstrations"
    if not found:
        raise ValueError(f"rl.guidance.source: {source} has no solution of any task of {domain}; {more}, or change source")
    ordered = sorted(found, key=lambda one: (one.task_id, len(one.turns), one.episode_id), reverse=True)
    return Solutions({one.task_id: one.turns for one in ordered}, failed)


def hints_by_rules(requests: Sequence[HintRequest], known: Solutions) -> list[str]:
    """The hint of each request, "" where there is none. Feedback is about the tree's failed paths where there are some."""
    hints = []
    for request in requests:
        branches = known.failed.get(request.task_id, ())
        failed = branches[request.number % len(branches)] if branches else request.failed
        hints.append(hint_of(request.kind, known.of.get(request.task_id, ()), failed.turns))
    return hints


def hints_by_server(requests: Sequence[HintRequest], known: Solutions, server: ChatServer, max_tokens: int) -> list[str]:
    """As `hints_by_rules`, written by a chat model; "" also where it refuses."""
    prompt = load_prompt(PROMPT)
    asked = [
        [
            {
                "role": "user",
                "content": prompt.fill(
                    words=max(1, max_tokens // 2),
                    kind=ASKS[request.kind],
                    task=request.failed.messages[0]["content"] if request.failed.messages else request.task_id,
                    solution=transcript(known.of.get(request.task_id, ())) or "(none is known)",
                    failed=transcript(request.failed.turns),
                ),
            }
        ]
        for request in requests
    ]
    return [" ".join((text or "").split()) for text in server.write(asked)]
