"""The cost of a constraint's mask: microseconds per sampled token, with and without one, on the shipped base model."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from stages.agent.chat import Chat
from stages.agent.constrained_engine import constrained
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.policy import load_policy
from stages.agent.rollout import Labels, attempts, collect
from stages.agent.turn_masks import GrammarMask, SpecMask
from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine
from stages.environments.registry import load_domain

LENGTH, SLOTS, EPISODES = 1000, 64, 64
ARMS: dict[str, dict[str, Any] | None] = {
    "no constraint": None,
    "search_then_answer": {"spec": "search_then_answer"},
    "react": {"spec": "react", "values": {"action": ["search"]}},
    "regex": {"kind": "regex", "spec": "(search|answer) [A-Za-z ]{1,40}"},
}


class Clock:
    """Seconds within the methods of masks."""

    seconds = 0.0

    def timed(self, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        return call


def play(policy: Any, chat: Chat, constraint: dict[str, Any] | None, folder: Path) -> tuple[float, int]:
    """Seconds and sampled tokens of EPISODES episodes."""
    domain = load_domain("search", {"max_turns": 6, "constraint": constraint})
    tasks = domain.build(list(domain.recipes(8, 0))[:8], folder, 1)
    engine = TorchEngine(policy.model, [chat.end_of_turn], SLOTS, LENGTH)
    masked = constrained(engine, chat, domain, "rollout", LENGTH)
    requests, sampling = attempts(tasks, EPISODES // len(tasks)), Sampling(max_tokens=96)
    with EnvironmentPool(lambda: domain.make(folder)) as pool:
        began = time.perf_counter()
        collect(masked, chat, pool, requests, sampling, Labels(0), max_length=LENGTH, width=SLOTS, threaded=False)
    return time.perf_counter() - began, engine.counters["sampled_tokens"]


def main() -> None:
    torch.set_num_threads(1)
    policy = load_policy(Path("data/base"))
    chat = Chat(policy.tokenizer)
    clock = Clock()
    for mask in (SpecMask, GrammarMask):
        for name in ("allowed", "append"):
            setattr(mask, name, clock.timed(getattr(mask, name)))
    for name, constraint in ARMS.items():
        clock.seconds = 0.0
        with tempfile.TemporaryDirectory() as folder:
            seconds, tokens = play(policy, chat, constraint, Path(folder))
        each, of_mask = 1e6 * seconds / tokens, 1e6 * clock.seconds / tokens
        print(f"{name:<20} {each:6.0f} us per token ({of_mask:.0f} us of it in the mask), {tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
