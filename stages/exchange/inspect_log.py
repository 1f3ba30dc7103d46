"""Episodes as an evaluation log of Inspect (UK AI Security Institute): EvalLog, version 2, as one JSON file or as `.eval`, a zip
of a header and a file per sample.

A sample is an episode: its task is the sample's id, its attempt the epoch, its outcome and reward terms are scores. What the
format has no place for is in the sample's store. Times are the start of 1970, so that the same episodes give the same bytes.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stages.exchange.aside import KEY, Aside, aside, restored
from stages.exchange.conversations import Conversation, calls_text, text_of
from stages.exchange.episodes import conversation, left_after
from stages.records.episode import Episode

Json = dict[str, Any]
VERSION = 2
CREATED = "1970-01-01T00:00:00+00:00"
ZIP_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold."""
LIMITS = {"turn_limit": "turn", "context": "context", "length": "token", "thinking": "token"}
"""Stop reason of a truncated episode -> Inspect's kind of limit."""
ATTACHMENT = re.compile(r"attachment://([0-9a-f]{32})")


def sample_of(episode: Episode, epoch: int) -> Json:
    """The episode as an EvalSample."""
    messages: list[Json] = []
    left = left_after(episode)
    for place, message in enumerate(conversation(episode)):
        made: Json = {**message, "id": f"{episode.episode_id}-{place}"}
        if message["role"] == "assistant":
            turn = episode.turns[place // 2]
            held: Json = {"turn": place // 2 + 1, "action": turn.action, "reward": turn.reward}
            held |= {"accepted": turn.accepted, "cost": turn.cost}
            if turn.end > turn.start:
                held |= {"logprob": math.fsum(episode.logprob[turn.start : turn.end])}
            made |= {"source": "generate", "model": episode.policy_hash, "metadata": held}
        elif place // 2 in left:
            made["metadata"] = {"left_context_after_turn": left[place // 2]}
        messages.append(made)
    replies = [message for message in messages if message["role"] == "assistant"]
    scores = {"success": float(episode.success), "reward": episode.reward, **episode.reward_terms}
    usage = _usage(episode)
    sample: Json = {
        "id": episode.task_id,
        "epoch": epoch,
        "input": messages[0]["content"],
        "target": "",
        "messages": messages,
        "output": _output(episode, replies[-1], usage) if replies else {},
        "scores": {name: {"value": value} for name, value in scores.items()},
        "metadata": {
            "domain": episode.domain,
            "stop_reason": episode.stop_reason,
            "policy_hash": episode.policy_hash,
            **({"left_context_after_turn": {str(turn): after for turn, after in left.items()}} if left else {}),
        },
        "store": {KEY: aside(episode, tokens=True)},
        "model_usage": {episode.policy_hash: usage},
        "uuid": episode.episode_id,
        "turn_count": len(replies),
    }
    if episode.truncated and episode.stop_reason in LIMITS:
        sample["limit"] = {"type": LIMITS[episode.stop_reason], "limit": float(len(replies))}
    return sample


def _output(episode: Episode, last: Json, usage: Json) -> Json:
    choice = {"message": last, "stop_reason": "max_tokens" if episode.truncated else "stop"}
    return {"model": episode.policy_hash, "choices": [choice], "completion": last["content"], "usage": usage}


def _usage(episode: Episode) -> Json:
    read, written = sum(turn.start for turn in episode.turns), sum(turn.end - turn.start for turn in episode.turns)
    return {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}


def _metric(name: str, value: float) -> Json:
    return {"name": name, "value": value}


def _score(name: str, values: Sequence[float]) -> Json:
    """Mean and standard error of a score, as Inspect's own scorers report them."""
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    error = math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else 0.0
    return {"name": name, "scorer": name, "metrics": {"mean": _metric("mean", mean), "stderr": _metric("stderr", error)}}


def eval_log(episodes: Sequence[Episode], model: str) -> Json:
    """An EvalLog; `model`: what the log calls who played. Raises ValueError without episodes."""
    if not episodes:
        raise ValueError("there are no episodes to export")
    attempts: dict[str, int] = {}
    samples = []
    for episode in episodes:
        attempts[episode.task_id] = attempts.get(episode.task_id, 0) + 1
        samples.append(sample_of(episode, attempts[episode.task_id]))
    domain = "+".join(sorted({episode.domain for episode in episodes}))
    names = list(dict.fromkeys(name for sample in samples for name in sample["scores"]))
    found = {name: [sample["scores"][name]["value"] for sample in samples if name in sample["scores"]] for name in names}
    return {
        "version": VERSION,
        "status": "success",
        "eval": {
            "eval_id": f"{domain}-{model}",
            "run_id": f"{domain}-{model}",
            "created": CREATED,
            "task": domain,
            "task_id": domain,
            "dataset": {"name": domain, "samples": len(attempts), "sample_ids": list(attempts), "shuffled": False},
            "model": model,
            "config": {"epochs": max(attempts.values())},
        },
        "plan": {"name": "plan", "steps": [{"solver": "policy"}]},
        "results": {
            "total_samples": len(samples),
            "completed_samples": len(samples),
            "scores": [_score(name, values) for name, values in found.items()],
        },
        "stats": {"started_at": CREATED, "completed_at": CREATED},
        "samples": samples,
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1).encode()


def log_bytes(log: Json, packed: bool) -> bytes:
    """The file: JSON, or with `packed` a `.eval`. The same log always gives the same bytes."""
    if not packed:
        return _json(log)
    header = {name: value for name, value in log.items() if name != "samples"}
    start = {"version": log["version"], "eval": log["eval"], "plan": log["plan"]}
    files = {"_journal/start.json": start}
    files |= {f"samples/{sample['id']}_epoch_{sample['epoch']}.json": sample for sample in log["samples"]}
    files |= {"summaries.json": [summary(sample) for sample in log["samples"]], "header.json": header}
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as made:
        for name, value in files.items():
            made.writestr(zipfile.ZipInfo(name, ZIP_DATE), _json(value), zipfile.ZIP_DEFLATED)
    return held.getvalue()


def summary(sample: Json) -> Json:
    """EvalSampleSummary: what Inspect's list of samples shows."""
    kept = {name: sample[name] for name in ("id", "epoch", "input", "target", "metadata", "scores", "model_usage", "uuid")}
    limit = {"limit": sample["limit"]["type"]} if "limit" in sample else {}
    return {**kept, **limit, "completed": True, "message_count": len(sample["messages"])}


# ---- import ---------------------------------------------------------------------------------------------------------------


def is_log(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("eval"), Mapping) and "status" in value


def is_ours(sample: Mapping[str, Any]) -> bool:
    return isinstance(sample.get("store"), Mapping) and KEY in sample["store"]


def episode_of(sample: Mapping[str, Any]) -> Episode:
    """The episode of a sample that `sample_of` made. Raises ValueError if it is another's or was changed inconsistently."""
    try:
        given = Aside.model_validate(sample["store"][KEY])
        opening, *others = sample["messages"]
        replies, answers = others[::2], [message["content"] for message in others[1::2]]
        turns = [
            (reply["content"], reply["metadata"]["action"], answer)
            for reply, answer in itertools.zip_longest(replies, answers, fillvalue="")
        ]
        return restored(given, opening["content"], turns, given.token_ids, given.logprob)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"sample {sample.get('id')} was not exported by this project, or was changed since: {error!r}"
        ) from error


def record_of(sample: Mapping[str, Any]) -> Json:
    """A sample's conversation, whoever made it, as a record for `curate.imports`.

    Calls of tools are lines of JSON after the message; their results are user messages; reasoning is left out. Raises ValueError
    for media and for a malformed sample.
    """
    chat, attachments = Conversation(), sample.get("attachments") or {}
    for number, message in enumerate(sample.get("messages") or []):
        where = f"messages[{number}]"
        text = ATTACHMENT.sub(lambda found: str(attachments.get(found[1], found[0])), _text(message.get("content"), where))
        if message.get("role") == "assistant":
            calls = calls_text(message.get("tool_calls") or [], "function")
            chat.add("assistant", "\n".join(filter(None, [text, calls])))
        else:
            chat.add("user", text)
    about = {"task_id": sample["id"], "domain": sample["metadata"]["domain"]} if is_ours(sample) else {}
    return chat.record(about)


def _text(content: Any, where: str) -> str:
    if isinstance(content, list):
        content = [part for part in content if not (isinstance(part, Mapping) and part.get("type") == "reasoning")]
    return text_of(content, where)


def samples_of(log: Mapping[str, Any]) -> Iterator[Json]:
    """Raises ValueError for a log without samples, such as one of which only the header was kept."""
    samples = log.get("samples")
    if not isinstance(samples, list) or not samples:
        raise ValueError("the log has no samples")
    if not all(isinstance(sample, Mapping) for sample in samples):
        raise ValueError("samples must be a list of objects")
    yield from samples
