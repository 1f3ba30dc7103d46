"""Turns a recording of outside agents (`python -m stages.serving --record FILE`) into episodes that rl trains on:

python -m stages.serving.episodes data/serving/recorded.jsonl --out data/raw/recorded/mine.parquet --policy data/models/sft

A trace becomes one episode for each conversation in it. A call goes on with the conversation whose tokens its prompt begins with.
If there is none, as in a sub-agent's first call, after a rewritten history, or where a text has other tokens than those that were
drawn, it begins one. All have the trace's reward (stages/agent/conversations.py). Traces of the same task are a group.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stages.records.actions import action_key
from stages.records.episode import Episode, Owner, TurnRecord, conversations, write_episodes
from stages.records.task import SUCCESS_TERM
from stages.runtime.command import command
from stages.serving.recording import Call, Trace, read_recording

UNREWARDED, EMPTY, MIXED, GREEDY, RESTRICTED = "unrewarded", "without_answers", "mixed_sampling", "greedy", "top_k_or_top_p"
"""Why traces are left out: no reward was reported; no token was drawn; their calls were drawn by different policies or sampling
settings; they were not drawn from the policy's distribution, or from a part of it that was not recorded."""


def reason_to_leave_out(trace: Trace) -> str | None:
    """Why a trace can't be trained on; None if it can."""
    if trace.reward is None:
        return UNREWARDED
    if not any(call.token_ids for call in trace.calls):
        return EMPTY
    if len({(call.policy_hash, call.sampling) for call in trace.calls}) > 1:
        return MIXED
    temperature, top_p, top_k = trace.calls[0].sampling
    if temperature == 0:
        return GREEDY
    return RESTRICTED if top_p < 1 or top_k > 0 else None


def task_of(trace: Trace) -> str:
    """The task's name, or one made of the first prompt."""
    return trace.task or f"prompt-{hashlib.sha256(repr(trace.calls[0].prompt_ids).encode()).hexdigest()[:12]}"


def _begun(trace: Trace, call: Call, name: str, domain: str) -> Episode:
    task = task_of(trace)
    episode = Episode(name, task, domain, task, 0, call.policy_hash, "", *call.sampling)
    episode.append(call.prompt_ids, Owner.PROMPT, -1)
    return episode


def _add(episode: Episode, call: Call) -> None:
    """Add a call whose prompt begins with the episode's tokens."""
    turn = len(episode.turns)
    if turn:
        episode.append(call.prompt_ids[len(episode.token_ids) :], Owner.ENVIRONMENT, turn - 1)
        episode.turns[-1].observation = call.asked
    start = len(episode.token_ids)
    episode.append(call.token_ids, Owner.POLICY, turn, call.logprobs)
    key = action_key(call.answered)
    episode.turns.append(TurnRecord(call.answered, "", True, 0.0, 0.0, "", key, start, len(episode.token_ids)))
    episode.messages += [{"role": "user", "content": call.asked}, {"role": "assistant", "content": call.answered}]


def episode_of(trace: Trace, name: str, domain: str) -> Episode:
    """The trace's first conversation as an episode named `name`, with the others as its forks."""
    found: list[Episode] = []
    for move, call in enumerate(one for one in trace.calls if one.token_ids):
        known = [one for one in found if tuple(one.token_ids) == call.prompt_ids[: len(one.token_ids)]]
        # Of several, the one that is repeated furthest, and the newest of equal ones.
        episode = max(reversed(known), key=lambda one: len(one.token_ids), default=None)
        if episode is None:
            episode = _begun(trace, call, f"{name}/{len(found)}" if found else name, domain)
            found.append(episode)
        _add(episode, call)
        episode.moves.append(move)
    assert trace.reward is not None
    for episode in found:
        episode.turns[-1].reward = episode.reward = trace.reward
        episode.reward_terms = {} if trace.success is None else {SUCCESS_TERM: float(trace.success)}
        episode.terminated, episode.stop_reason = True, "terminated"
        episode.play, episode.moves = (name, episode.moves) if len(found) > 1 else ("", [])
    found[0].forks = found[1:]
    return found[0]


def episodes_of(traces: Sequence[Trace], domain: str) -> tuple[list[Episode], Counter[str]]:
    """An episode of each trace that can be trained on, with its forks, sorted by id; and how many were left out, by reason."""
    left: Counter[str] = Counter()
    attempts: Counter[str] = Counter()
    found = []
    for trace in sorted(traces, key=lambda trace: trace.name):
        if reason := reason_to_leave_out(trace):
            left[reason] += 1
            continue
        task = task_of(trace)
        found.append(episode_of(trace, f"{task}/{attempts[task]:04d}", domain))
        attempts[task] += 1
    return sorted(found, key=lambda episode: episode.episode_id), left


def check_policy(traces: Sequence[Trace], folder: Path) -> None:
    """Raise ValueError if traces with a reward were answered by another policy than that in `folder`."""
    from stages.agent.policy import policy_hash

    others = Counter(call.policy_hash for trace in traces if trace.reward is not None for call in trace.calls[:1])
    own = policy_hash(folder)
    others.pop(own, None)
    if others:
        named = ", ".join(f"{count} of policy {name}" for name, count in sorted(others.items()))
        raise ValueError(
            f"traces of other policies than {folder} ({own}): {named}; a policy's training starts from its own answers and their "
            f"log-probabilities: serve {folder} with --record and another file"
        )


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.serving.episodes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recording", type=Path, help="what --record has written")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a table of episodes, below data/raw for rl")
    parser.add_argument("--domain", default="outside_agent", help="the domain that they are of")
    parser.add_argument("--policy", type=Path, metavar="FOLDER", help="refuse a recording of another policy than this one")
    options = parser.parse_args(argv)
    try:
        traces = read_recording(options.recording)
        if options.policy is not None:
            check_policy(traces, options.policy)
        episodes, left = episodes_of(traces, options.domain)
        if not episodes:
            raise ValueError(f"{options.recording} has no trace that can be trained on; left out: {dict(sorted(left.items()))}")
    except (ValueError, OSError) as error:
        print(f"episodes: {error}", file=sys.stderr)
        return 2
    rows = conversations(episodes)
    write_episodes(options.out, rows)
    counts = {
        "plays": len(episodes),
        "conversations": len(rows),
        "tasks": len({episode.task_id for episode in episodes}),
        "mean_reward": sum(episode.reward for episode in episodes) / len(episodes),
        "left_out": dict(sorted(left.items())),
    }
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
