"""Episodes in the Agent Trajectory Interchange Format (ATIF) of Harbor, RFC 0001 of its documentation, version 1.7.

The opening is a step of the user, each turn one of the agent: its message, the action as a call of the tool `act`, the
observation as that call's result with reward and cost, and the turn after which it left the context if it did, token ids and
log-probabilities as metrics. Turns that a branch inherited are copied context, which ATIF excludes from training. An episode's
role is in the agent's name. What the format has no place for is in `extra`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stages.exchange.aside import KEY, Aside, aside, restored
from stages.exchange.conversations import Conversation, calls_text, text_of
from stages.exchange.episodes import conversation, left_after
from stages.records.episode import Episode

SCHEMA = "ATIF-v1.7"
AGENT, AGENT_VERSION, TOOL = "bellwether", "1", "act"
Json = dict[str, Any]


def split_message(message: str, action: str) -> tuple[str, str]:
    """(thought, action) that make up a turn's message; the thought is empty if the action is not at its end."""
    return (message.removesuffix(action), action) if action and message.endswith(action) else ("", message)


def agent_step(episode: Episode, number: int, message: str, step_id: int) -> Json:
    """The step of turn `number`."""
    turn = episode.turns[number]
    thought, said = split_message(message, turn.action)
    call = f"turn-{number + 1}"
    found: Json = {"reward": turn.reward, "accepted": turn.accepted, "cost": turn.cost}
    if (after := left_after(episode).get(number + 1)) is not None:
        found["left_context_after_turn"] = after
    step: Json = {
        "step_id": step_id,
        "source": "agent",
        "message": said,
        **({"reasoning_content": thought} if thought else {}),
        "tool_calls": [{"tool_call_id": call, "function_name": TOOL, "arguments": {"action": turn.action}}],
        "observation": {"results": [{"source_call_id": call, "content": turn.observation, "extra": found}]},
        "llm_call_count": 1,
    }
    if number < episode.inherited:
        step["is_copied_context"] = True
    if episode.token_ids:
        step["metrics"] = {
            "prompt_tokens": turn.start,
            "completion_tokens": turn.end - turn.start,
            "prompt_token_ids": episode.token_ids[: turn.start],
            "completion_token_ids": episode.token_ids[turn.start : turn.end],
            "logprobs": episode.logprob[turn.start : turn.end],
        }
    return step


def trajectory(episode: Episode) -> Json:
    """The episode as an ATIF document."""
    messages = conversation(episode)
    steps: list[Json] = [{"step_id": 1, "source": "user", "message": messages[0]["content"]}]
    for number, message in enumerate(messages[1::2]):
        steps.append(agent_step(episode, number, message["content"], number + 2))
    ends = [turn.end for turn in episode.turns]
    rest = max(ends, default=0)
    inside = {place for turn in episode.turns for place in range(turn.start, turn.end)}
    outside = {str(place): value for place, value in enumerate(episode.logprob[:rest]) if value and place not in inside}
    held = {"aside": aside(episode), "outside": outside}
    held |= {"token_ids": episode.token_ids[rest:], "logprobs": episode.logprob[rest:]}
    spoke = {name: value for name in ("role", "play", "moves") if (value := getattr(episode, name))}
    return {
        "schema_version": SCHEMA,
        "session_id": episode.group_id,
        "trajectory_id": episode.episode_id,
        "agent": {
            "name": f"{AGENT} ({episode.role})" if episode.role else AGENT,
            "version": AGENT_VERSION,
            "model_name": episode.policy_hash,
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(turn.start for turn in episode.turns),
            "total_completion_tokens": sum(turn.end - turn.start for turn in episode.turns),
            "total_steps": len(steps),
            "extra": {"reward": episode.reward, "success": episode.success, **episode.reward_terms},
        },
        "extra": {"task_id": episode.task_id, "domain": episode.domain, "stop_reason": episode.stop_reason, **spoke, KEY: held},
    }


def is_trajectory(value: Any) -> bool:
    return isinstance(value, Mapping) and str(value.get("schema_version", "")).startswith("ATIF-")


def is_ours(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("extra"), Mapping) and KEY in value["extra"]


def _turn(step: Mapping[str, Any]) -> tuple[str, str, str]:
    """Message, action and observation of an exported agent step. Raises KeyError or IndexError for another's."""
    call, result = step["tool_calls"][0], step["observation"]["results"][0]
    return str(step.get("reasoning_content") or "") + step["message"], call["arguments"]["action"], result["content"]


def episode_of(value: Mapping[str, Any]) -> Episode:
    """The episode of a trajectory that `trajectory` made. Raises ValueError if it is another's or was changed inconsistently."""
    name = value.get("trajectory_id")
    try:
        held = value["extra"][KEY]
        given = Aside.model_validate(held["aside"])
        opening, *steps = value["steps"]
        turns = [_turn(step) for step in steps]
        tokens, logprobs = _tokens([step.get("metrics") for step in steps], given, held)
        return restored(given, opening["message"], turns, tokens, logprobs)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"trajectory {name} was not exported by this project, or was changed since: {error!r}") from error


def _tokens(metrics: Sequence[Any], given: Any, held: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """All token ids and log-probabilities. Raises ValueError if a turn's prompt does not continue the one before."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for own, turn in zip(metrics, given.turns, strict=False):
        if own is None:
            continue
        prompt, completion = own["prompt_token_ids"], own["completion_token_ids"]
        if prompt[: len(tokens)] != tokens or len(prompt) != turn.start or len(completion) != turn.end - turn.start:
            raise ValueError(f"the tokens of {given.episode_id} do not continue those of the turn before")
        logprobs += [0.0] * (len(prompt) - len(tokens)) + own["logprobs"]
        tokens = [*prompt, *completion]
    for place, logprob in held["outside"].items():
        logprobs[int(place)] = logprob
    return [*tokens, *held["token_ids"]], [*logprobs, *held["logprobs"]]


def records_of(value: Mapping[str, Any]) -> Iterator[Json]:
    """The conversation of a trajectory, whoever made it, and of those embedded in it, as records for `curate.imports`.

    Calls of tools other than ours are lines of JSON after the message, reasoning is left out. Raises ValueError for media and for
    a malformed trajectory.
    """
    ours, chat = is_ours(value), Conversation()
    steps = value.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise ValueError("steps must be a list of objects")
    for number, step in enumerate(steps, start=1):
        where, context = f"step {number}", bool(step.get("is_copied_context"))
        text = text_of(step.get("message"), where)
        if step.get("source") == "agent":
            calls = step.get("tool_calls") or []
            said = str(step.get("reasoning_content") or "") + text if ours else text
            shown = "" if ours else calls_text(calls, "function_name")
            chat.add("assistant", "\n".join(filter(None, [said, shown])), context)
        else:
            chat.add("user", text, context)
        results = (step.get("observation") or {}).get("results") or []
        answers = [text_of(result.get("content"), f"{where}, result") for result in results]
        if answers:
            chat.add("user", "\n".join(filter(None, answers)), context)
    about = {name: value["extra"][name] for name in ("task_id", "domain")} if ours else {}
    yield chat.record(about)
    for inner in value.get("subagent_trajectories") or []:
        yield from records_of(inner)
