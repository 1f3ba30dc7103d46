"""The episode browser's data: which episodes are shown, in a compact form for the page's script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.agent.sample_episodes import choose, outcome
from stages.records.episode import Owner
from stages.reporting.blocks import rounded
from stages.reporting.hidden import Chats, hidden_observations, no_chat

BYTES = 1_500_000
"""Limit of the browser's data, shared by the domains; episodes beyond it are left out, and the page says so."""

JUDGMENTS, REASON = 8, 300
"""Judgments of an episode that the page shows, and characters of a reason or another answer."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Browser:
    """`data`: {"vocabulary": {id: text}, "episodes": [...]}; `chosen`: number of episodes before the limit."""

    data: Mapping[str, Any]
    chosen: int

    @property
    def shown(self) -> int:
        return len(self.data["episodes"])


def _runs(values: Sequence[Any]) -> list[list[Any]]:
    """Run-length encoding: [[value, count], ...]."""
    runs: list[list[Any]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return runs


def _judgment(row: Row) -> dict[str, Any]:
    """One judgment of an episode: its own score first, then the other's, which was shown `first` or second."""
    own = row["place"]
    order = [own, *(place for place in range(len(row["candidates"])) if place != own)]
    scores = [rounded(row["scores"][place]) for place in order] if len(row["scores"]) == len(order) else list(row["scores"])
    other = row["answers"][order[1]] if len(order) > 1 else ""
    return {
        **{"judge": row["judge"], "kind": row["kind"], "first": own == 0, "scores": scores, "reason": row["reason"][:REASON]},
        **{"status": row["status"], "other": other[:REASON], "cost": rounded(row["money"], 6)},
    }


def pack(row: Row, source: str, pick: str, chat: Chats = no_chat) -> dict[str, Any]:
    """One episode for the page.

    Per token: `ids`, `owner` (a digit each), `turn` (runs); per policy token: `logprob`, and `advantage` (runs) if trained on.
    `hidden`: `hidden_observations`, if there are some.
    """
    policy = [place for place, owner in enumerate(row["owner"]) if owner == Owner.POLICY]
    advantages = row.get("advantages")
    terms = row.get("reward_terms") or {}
    packed = {
        "id": row["episode_id"],
        "task": row["task_id"],
        "domain": row["domain"],
        "source": source,
        "pick": pick,
        "outcome": outcome(row),
        "reward": rounded(row["reward"]),
        "terms": json.loads(terms) if isinstance(terms, str) else terms,
        "stop": row["stop_reason"],
        "policy": row["policy_hash"],
        **({"role": row["role"], "play": row["play"]} if row.get("role") else {}),
        "messages": [[message["role"], message["content"]] for message in row["messages"]],
        "turns": [[turn["accepted"], rounded(turn["reward"])] for turn in row["turns"]],
        "ids": list(row["token_ids"]),
        "owner": "".join(str(owner) for owner in row["owner"]),
        "turn": _runs(row["turn"]),
        "logprob": [rounded(row["logprob"][place]) for place in policy],
    }
    if row.get("judgments"):
        packed["judgments"] = [_judgment(one) for one in row["judgments"][:JUDGMENTS]]
    if hidden := hidden_observations(row, chat):
        packed["hidden"] = hidden
    if advantages is not None:
        packed["advantage"] = _runs([rounded(advantages[place]) for place in policy])
    return packed


def token_text(tokenizer: Any | None, token: int) -> str:
    """The text of a token; `#id` without a tokenizer or for an unknown id."""
    if tokenizer is None:
        return f"#{token}"
    name = tokenizer.id_to_token(token)
    if name is None:
        return f"#{token}"
    text = tokenizer.decode([token], skip_special_tokens=False)
    if not text or "\ufffd" in text:
        return name
    # SentencePiece-like decoders drop the leading space of the first piece.
    return " " + text if name.startswith("▁") and not text.startswith(" ") else text


def browser_data(
    domains: Mapping[str, Mapping[str, Sequence[Row]]],
    count: int,
    tokenizer: Any | None,
    seed: int,
    limit: int = BYTES,
    chat: Chats = no_chat,
) -> Browser:
    """`count` episodes per domain, split evenly between its sources ({domain: {source: rows}}), within `limit` bytes of JSON.
    chat: finds the tokens of hidden observations."""
    episodes: list[dict[str, Any]] = []
    chosen = 0
    for domain, sources in domains.items():
        left = limit // max(len(domains), 1)
        picked = []
        for place, (source, rows) in enumerate(sources.items()):
            share = count // len(sources) + (place < count % len(sources))
            picked.append([pack(row, source, pick, chat) for pick, row in choose(rows, share, seed, "report", domain, source)])
        chosen += sum(map(len, picked))
        # One from each source in turn, so that the limit affects all sources alike.
        for rank in range(max(map(len, picked), default=0)):
            for packed in (group[rank] for group in picked if rank < len(group)):
                size = len(json.dumps(packed, separators=(",", ":")))
                if size <= left:
                    left -= size
                    episodes.append(packed)
    used = sorted({token for episode in episodes for token in episode["ids"]})
    vocabulary = {str(token): token_text(tokenizer, token) for token in used}
    return Browser({"vocabulary": vocabulary, "episodes": episodes}, chosen)
