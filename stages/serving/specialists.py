"""Answers chat completions through a conversion's router: a specialist where it is good enough, else the large model.

A specialist reads the masked prompt, as in its training, and its answer is unmasked. Whose answer is taken is decided as in
`CallRouter.route`, which judged the specialists, from the same tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stages.agent.best_of_n import BestOfEngine, by_logprob
from stages.agent.chat import Chat
from stages.conversion.masking import Masker
from stages.conversion.router import LARGE, SIMILARITY, CallRouter, Specialist
from stages.conversion.specialise import SLOTS, answer_of
from stages.engine.engine import Sampling, Turn
from stages.engine.local_engine import make_engine
from stages.records.messages import Messages
from stages.serving.engine_thread import EngineThread, GenerationJob
from stages.serving.schemas import ChatRequest
from stages.serving.variants import PLAIN

Run = Callable[[Sequence[GenerationJob], EngineThread], Awaitable[list[list[Turn]]]]
"""Runs jobs on an engine and returns each one's turns."""


@dataclass(frozen=True)
class Decision:
    """Who answers a call: LARGE or a specialist; `fallback`: why a specialist does not. `text`, `turn`: the specialist's answer
    to the tokens `prompt`, by the model `policy_hash`."""

    by: str = LARGE
    fallback: str = ""
    text: str = ""
    turn: Turn | None = None
    prompt: tuple[int, ...] = ()
    policy_hash: str = ""


def draws(body: ChatRequest) -> bool:
    """Whether a request asks for draws of the large model: several, random ones, or their tokens."""
    random = body.temperature is None and (body.top_p is not None or body.top_k is not None)
    return body.n > 1 or body.logprobs or body.return_token_ids or random or bool(body.temperature)


class Specialists:
    """The promoted specialists of a router, each behind an engine of its own. `masker`: one with an empty vault, as the log is
    masked; `names`: of the models whose requests are routed. Raises RouterError if a specialist is not the router's."""

    def __init__(self, router: CallRouter, masker: Callable[[], Masker], names: Sequence[str]) -> None:
        self.router, self.masker, self.names = router, masker, frozenset(names)
        self.counts: Counter[str] = Counter()
        """Routed calls by who answered, and why no specialist did."""
        policies = {number: router.policy(number) for number in router.specialists}
        self._chats = {number: Chat(policy.tokenizer) for number, policy in policies.items()}
        self._turns: dict[int, EngineThread] = {}
        for number, policy in policies.items():
            chat = self._chats[number]
            engine = make_engine(policy.model, [chat.end_of_turn], SLOTS, router.max_length)
            self._turns[number] = EngineThread(BestOfEngine(engine, 1, by_logprob, lambda tokens: ""))

    @property
    def alive(self) -> bool:
        return all(turns.alive for turns in self._turns.values())

    def close(self) -> None:
        for turns in self._turns.values():
            turns.close()

    def described(self) -> str:
        """The specialists, for a person."""
        listed = [f"{one.name} ({one.candidate})" for _, one in sorted(self.router.specialists.items())]
        return f"router {self.router.folder}: {', '.join(listed) or 'no cluster has a specialist'}"

    def counted(self) -> str:
        """Who answered how many calls, for a person."""
        parts = [f"{count} by {name}" for name, count in sorted(self.counts.items())]
        return f"routed {sum(self.counts.values())} calls" + (f": {', '.join(parts)}" if parts else "")

    async def decide(self, messages: Messages, trace: str, max_tokens: int | None, run: Run) -> Decision:
        """Who answers a call, counted, with the answer if that is a specialist; `max_tokens` of the request cut it if they are
        fewer than the router's."""
        masker = self.masker()
        call = masker.mask_call({"trace": trace, "prompt": messages, "response": ""})
        cluster = int(self.router.clusters_of([call])[0])
        specialist = self.router.specialists.get(cluster)
        if specialist is None:
            found = Decision(LARGE, SIMILARITY if cluster < 0 else "")
        else:
            found = await self._asked(specialist, call, masker, max_tokens, run)
        self.counts[found.by + (f" ({found.fallback})" if found.fallback else "")] += 1
        return found

    async def _asked(
        self, specialist: Specialist, call: dict[str, Any], masker: Masker, max_tokens: int | None, run: Run
    ) -> Decision:
        chat, router = self._chats[specialist.cluster], self.router
        token_ids = chat.encode(call["prompt"]).token_ids
        turn = Turn(0, (), (), "context")
        if len(token_ids) < router.max_length:
            sampling = Sampling(temperature=0.0, max_tokens=min(router.max_tokens, max_tokens or router.max_tokens))
            job = GenerationJob(token_ids, [0], sampling, PLAIN)
            ((turn,),) = await run([job], self._turns[specialist.cluster])
        answer = answer_of(chat, turn)
        if why := specialist.refusal(call, answer):
            return Decision(LARGE, why)
        text = masker.unmask(answer.text)
        return Decision(specialist.name, "", text, turn, tuple(token_ids), specialist.policy_hash)
