"""The guided pass: attempts with a hint at the training tasks in which a plain attempt of the rollout stage failed.

It is played once, by the SFT policy, before rl's first training step, in chunks that are checkpoints. Its table,
data/rl/<domain>/guided.parquet, has every episode as it was played, hint included; training reads it without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stages.agent.active_episode import EpisodeRequest
from stages.agent.chat import Chat
from stages.agent.constrained_engine import constrained
from stages.agent.environment_pool import EnvironmentPool, processes_beside
from stages.agent.guidance import leaks, marked, shows_marks, solution_answers
from stages.agent.policy import Policy
from stages.agent.rollout import Labels, collect
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.parts.guidance import Guidance, plays_guided, reads_guided
from stages.engine.engine import Sampling
from stages.engine.local_engine import make_engine
from stages.environments.protocol import Domain
from stages.judging.chat_server import ChatServer
from stages.records.episode import EPISODE_SCHEMA, Episode, episode_row, read_tasks
from stages.records.sections import params_hash, seed_of
from stages.records.task import Task
from stages.runtime.checkpoints import Checkpoints
from stages.training.common.processes import Processes
from stages.training.rl.hint_teachers import HintRequest, Solutions, hints_by_rules, hints_by_server, read_solutions
from stages.training.rl.offline_dataset import read_source

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext

CHUNK = 192
"""Episodes between checkpoints."""
GUIDED_SCHEMA = pa.schema([*EPISODE_SCHEMA, ("kind", pa.string()), ("hint", pa.string())])


@dataclass(frozen=True)
class Hint:
    """A hint that passed the checks, for one attempt at a task."""

    task_id: str
    attempt: int
    kind: str
    text: str


@dataclass(frozen=True)
class GuidedEpisode:
    hint: Hint
    episode: Episode
    """As it was played, with the hint."""


@dataclass(frozen=True)
class Attempts:
    """The plain attempts of the rollout stage, and the guided ones."""

    plain: Sequence[Episode]
    guided: Sequence[GuidedEpisode] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """Hints that were made, and those that were not used, by reason."""

    @property
    def trainable(self) -> list[Episode]:
        """The plain attempts without marks of hints anywhere; a policy that was warmed up with hints may write some itself."""
        return [one for one in self.plain if not shows_marks(message["content"] for message in one.messages)]

    def rows(self) -> list[dict[str, Any]]:
        """Rows of GUIDED_SCHEMA."""
        return [{**episode_row(one.episode), "kind": one.hint.kind, "hint": one.hint.text} for one in self.guided]

    @property
    def steps(self) -> int:
        """Turns played in the guided pass; those of the plain attempts belong to the rollout stage."""
        return sum(len(one.episode.played) for one in self.guided)

    def report(self) -> dict[str, Any]:
        """Part of reports/rl/<domain>.json."""
        guided = [one.episode for one in self.guided]
        solved, helped = solved_tasks(self.plain), solved_tasks(guided)
        kinds = sorted({one.hint.kind for one in self.guided})
        by_kind = {kind: [one.episode.success for one in self.guided if one.hint.kind == kind] for kind in kinds}
        return {
            "tasks": len({episode.task_id for episode in self.plain}),
            "plain_episodes": len(self.plain),
            "plain_steps": sum(len(episode.played) for episode in self.plain),
            "plain_marked": len(self.plain) - len(self.trainable),
            "plain_success": mean([episode.success for episode in self.plain]),
            "guided_episodes": len(guided),
            "guided_success": mean([episode.success for episode in guided]),
            "coverage_plain": len(solved),
            "coverage_guided": len(solved | helped),
            "success_by_kind": {kind: mean(successes) for kind, successes in by_kind.items()},
            "hints": dict(self.counts),
        }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def solved_tasks(episodes: Sequence[Episode]) -> set[str]:
    return {episode.task_id for episode in episodes if episode.success}


def plan_hints(plain: Sequence[Episode], settings: Guidance) -> list[HintRequest]:
    """`attempts` hints for each task with a failed attempt: kinds in turn, and after all kinds the next failed attempt."""
    failures: dict[str, list[Episode]] = {}
    for episode in sorted(plain, key=lambda episode: episode.episode_id):
        if not episode.success:
            failures.setdefault(episode.task_id, []).append(episode)
    requests = []
    for task_id, failed in sorted(failures.items()):
        for attempt in range(settings.attempts):
            turn, kind = divmod(attempt, len(settings.kinds))
            number = turn % len(failed)
            requests.append(HintRequest(task_id, attempt, settings.kinds[kind], failed[number], number))
    return requests


def checked_hints(
    requests: Sequence[HintRequest], texts: Sequence[str], answers: Mapping[str, Sequence[str]], chat: Chat, settings: Guidance
) -> tuple[list[Hint], dict[str, int]]:
    """The hints that may be used, and counts of all by what became of them. `answers`: by task."""
    hints, counts = [], Counter({"used": 0, "none": 0, "leaked": 0, "too_long": 0})
    for request, text in zip(requests, texts, strict=True):
        if not text:
            outcome = "none"
        elif settings.forbid_answer and leaks(text, *answers.get(request.task_id, ())):
            outcome = "leaked"
        elif len(chat.tokens_of(chat.clean(marked(text)))) > settings.max_tokens:
            outcome = "too_long"
        else:
            outcome = "used"
            hints.append(Hint(request.task_id, request.attempt, request.kind, text))
        counts[outcome] += 1
    return hints, dict(sorted(counts.items()))


def answers_of(domain: Any, tasks: Mapping[str, Task], known: Solutions) -> dict[str, list[str]]:
    """Task -> what its hints must not contain (`solution_answers`)."""
    read, found = getattr(domain, "answer", None), {}
    for task_id, task in tasks.items():
        turns = known.of.get(task_id, ())
        action = turns[-1].action if turns else ""
        found[task_id] = solution_answers(task.spec, action, read(action) if read is not None else None)
    return found


class GuidedPass:
    """Makes the hints and plays the attempts. The processes share the attempts of a chunk; the first one asks a server."""

    def __init__(
        self,
        context: StageContext,
        algorithm: Algorithm,
        policy: Policy,
        processes: Processes,
        domain: Domain,
        checkpoints: Checkpoints,
    ) -> None:
        self.context, self.rl, self.settings = context, algorithm.rl, algorithm.rl.guidance
        self.policy, self.processes, self.domain, self.checkpoints = policy, processes, domain, checkpoints
        self.name, self.seed = str(context.domain), seed_of(context.params, algorithm.rl)
        self.chat = Chat(policy.tokenizer, context.params.model.thinking)
        self.curated = context.data / "curated" / self.name

    def run(self) -> Attempts:
        """Raises ValueError if there are no solutions to make hints of, JudgeError if the server does not answer."""
        tasks = {task.task_id: task for task in read_tasks(self.curated / "tasks.parquet", "train")}
        plain = read_source(self.context.data, self.name, "rollouts", tasks)
        if not plays_guided(self.rl):
            return Attempts(plain)
        hints, counts = self.hints(plain, tasks)
        return Attempts(plain, self.play(tasks, hints), counts)

    def hints(self, plain: Sequence[Episode], tasks: Mapping[str, Task]) -> tuple[list[Hint], dict[str, int]]:
        saved = self.checkpoints.load("guided-hints")
        if saved is not None:
            return [Hint(*values) for values in saved["hints"]], saved["counts"]
        requests = plan_hints(plain, self.settings)
        if not requests:
            return [], {}
        known = read_solutions(self.settings.source, self.curated, self.context.data / "annotated" / self.name, self.name)
        texts = self.processes.gather(self._texts(requests, known) if self.context.main else [])
        hints, counts = checked_hints(requests, texts, answers_of(self.domain, tasks, known), self.chat, self.settings)
        if self.context.main:
            rows = [(hint.task_id, hint.attempt, hint.kind, hint.text) for hint in hints]
            self.checkpoints.save("guided-hints", {"hints": rows, "counts": counts})
        return hints, counts

    def _texts(self, requests: Sequence[HintRequest], known: Solutions) -> list[str]:
        if self.settings.source != "server":
            return hints_by_rules(requests, known)
        server = ChatServer(self.settings.server, "rl.guidance.server", self.context.root)
        try:
            return hints_by_server(requests, known, server, self.settings.max_tokens)
        finally:
            server.close()

    def play(self, tasks: Mapping[str, Task], hints: Sequence[Hint]) -> list[GuidedEpisode]:
        if not hints:
            return []
        params, made = self.context.params, {(hint.task_id, hint.attempt): hint for hint in hints}
        model = self.policy.model.to(self.processes.device)
        own = make_engine(model, [self.chat.end_of_turn], params.resources.slots, params.model.max_length)
        engine = constrained(own, self.chat, self.domain, "rl", params.model.max_length)
        labels = Labels(self.seed, self.policy.hash, params_hash(self.rl), stream=f"guided@{self.name}")
        requests = [EpisodeRequest(tasks[hint.task_id], hint.attempt, hint.task_id, guidance=marked(hint.text)) for hint in hints]
        hint_of = {request.episode_id: made[request.task.task_id, request.attempt] for request in requests}
        pool = EnvironmentPool(partial(self.domain.make, self.curated / "worlds"), processes_beside(params.resources))
        played: list[Episode] = []
        with pool, self.context.progress("guided attempts", len(requests), "episode") as bar:
            for number, start in enumerate(range(0, len(requests), CHUNK)):
                chunk: list[Episode] | None = self.checkpoints.load(f"guided-{number:05d}")
                if chunk is None:
                    part = requests[start : start + CHUNK][self.processes.index :: self.processes.count]
                    chunk = self.processes.gather(
                        collect(
                            *(engine, self.chat, pool, part, Sampling(**self.rl.sampling.model_dump()), labels),
                            max_length=params.model.max_length,
                            max_turns=self.domain.settings.max_turns,
                            width=params.resources.slots,
                        )
                    )
                    chunk.sort(key=lambda episode: episode.episode_id)
                    if self.context.main:
                        self.checkpoints.save(f"guided-{number:05d}", chunk)
                    bar.advance(len(chunk))
                else:
                    bar.restore(len(chunk))
                played += chunk
        return [GuidedEpisode(hint_of[episode.episode_id], episode) for episode in played]


def read_attempts(
    context: StageContext,
    algorithm: Algorithm,
    policy: Policy,
    processes: Processes,
    domain: Domain,
    checkpoints: Checkpoints,
) -> Attempts | None:
    """The attempts that the algorithm learns from, after the guided pass if it needs one; None if it learns from others."""
    if algorithm.method.data != "attempts" and not (algorithm.method.data == "pairs" and reads_guided(algorithm.rl)):
        return None
    return GuidedPass(context, algorithm, policy, processes, domain, checkpoints).run()
