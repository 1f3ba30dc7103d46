"""Sends an episode as an MLflow trace: a root span, and per turn one span each for policy and environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.tracking.server import Server

NAME_CHARACTERS = 60
FEEDBACK = ("reward", "success")
"""Outcomes logged as assessments, which the UI shows in columns, as it does the reward terms."""
VIEWER = "viewer"
"""Tag with the episode's address in the viewer."""


def log_trace(server: Server, run_id: str, event: Mapping[str, Any], key: str, doubt: bool) -> None:
    """Log a trace exactly once: with `doubt` (an earlier attempt may have succeeded), look it up by its tag `event` first."""
    found = []
    if doubt:
        query = f"tags.event = '{key}'"
        found = list(server.client.search_traces(locations=[server.experiment], filter_string=query, max_results=1))
    if found:
        trace_id, known = found[0].info.trace_id, {item.name for item in found[0].info.assessments}
    else:
        trace_id, known = _log_spans(server, run_id, event, key), set()
    outcomes = {name: event["outcome"][name] for name in FEEDBACK if name in event["outcome"]}
    told = f"[the episode in the viewer]({event[VIEWER]})" if VIEWER in event else None
    for name, value in {**outcomes, **event.get("scores", {})}.items():
        if name not in known:
            given = {"name": name, "value": value, "rationale": told, "metadata": {"event": key}}
            server.mlflow.log_feedback(trace_id=trace_id, source=_environment(server), **given)


def _environment(server: Server) -> Any:
    entities = server.mlflow.entities
    return entities.AssessmentSource(source_type=entities.AssessmentSourceType.CODE, source_id="environment")


def _log_spans(server: Server, run_id: str, event: Mapping[str, Any], key: str) -> str:
    """Span times are artificial, one millisecond per span: they only order the turns."""
    start, step = event["t"] * 1_000_000, 1_000_000
    begin = server.mlflow.start_span_no_context
    root = begin(
        event["name"],
        span_type="AGENT",
        inputs={"messages": [{"role": "user", "content": event["prompt"]}]},
        tags={**event["tags"], **({VIEWER: event[VIEWER]} if VIEWER in event else {}), "event": key},
        metadata={"mlflow.sourceRun": run_id},
        experiment_id=server.experiment,
        start_time_ns=start,
    )
    at, seen = start, event["prompt"]
    for number, turn in enumerate(event["turns"]):
        thought = {name: turn[name] for name in ("tokens", "logprob", "advantage") if name in turn}
        policy = begin(
            f"turn {number + 1}: {turn['action'][:NAME_CHARACTERS]}",
            span_type="CHAT_MODEL",
            parent_span=root,
            inputs={"messages": [{"role": "user", "content": seen}]},
            attributes=thought,
            start_time_ns=at,
        )
        policy.end(outputs={"messages": [{"role": "assistant", "content": turn["action"]}]}, end_time_ns=at + step)
        tool = begin(
            f"turn {number + 1}: environment",
            span_type="TOOL",
            parent_span=root,
            inputs={"action": turn["action"]},
            start_time_ns=at + step,
        )
        told = ("observation", "left_context_after_turn", "reward", "accepted", "cost")
        outputs = {name: turn[name] for name in told if name in turn}
        if "advantage" in thought:
            outputs["advantage"] = thought["advantage"]
        tool.end(outputs=outputs, end_time_ns=at + 2 * step)
        at, seen = at + 2 * step, turn["observation"]
    root.end(outputs=dict(event["outcome"]), end_time_ns=max(at, start + step))
    return str(root.trace_id)
