"""Curated tasks under an instruction that is drawn from a population, which evolves with the policy (INSPO, arXiv 2512.01945).

In each step every question is drawn with one instruction for its whole group. After the step, weights follow the rewards of the
episodes; every `evolve_every` steps, before the next one, the population is pruned, an editor writes candidates from the best
instructions and the buffer's failures, the current policy plays them on a few questions, and the best of those that are no worse
than the best survivor join.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.agent.active_episode import EpisodeRequest
from stages.agent.guidance import accepted_answers, leaks
from stages.agent.instructions import QUESTION, fault, instructed, write_instruction
from stages.algorithms.instruction_editors import by_chance, by_rules, by_server
from stages.algorithms.instruction_settings import InstructionSettings
from stages.algorithms.population import Instruction, Turn, WorstEpisodes, attributed, halved, pick, shares
from stages.algorithms.sources.static import StaticTasks
from stages.algorithms.task_source import SourceInputs
from stages.seeding import permutation, stream

if TYPE_CHECKING:
    from stages.algorithms.settings import Rl
    from stages.records.episode import Episode
    from stages.records.task import Task

_MARK = "+instruction-"
"""In the ids of tasks whose prompt an instruction changed."""


class Instructions(StaticTasks):
    """See the module. Raises ValueError if there are too few questions to verify candidates on."""

    Settings = InstructionSettings
    curated = False  # its tasks have ids of their own, which earlier stages wrote nothing about

    def __init__(self, inputs: SourceInputs) -> None:
        super().__init__(inputs)
        self.settings: InstructionSettings = inputs.rl.tasks.settings
        first = self.settings.first_weight
        self.population = [Instruction(number, text, first) for number, text in enumerate(self.settings.seeds)]
        self.written = len(self.population)
        """Instructions so far, for numbers."""
        self.buffer = WorstEpisodes(self.settings.buffer)
        self.counts: Counter[str] = Counter()
        """Candidates by what became of them, and episodes that verified them."""
        self.drawn: dict[str, tuple[str, int]] = {}
        """Id of a drawn task -> the curated task's, and the instruction's number."""
        self.due = False
        """Whether the population shall evolve before the next step."""
        self._metrics: dict[str, float] = {}
        self._check_questions()

    @classmethod
    def weighted(cls, rl: Rl) -> bool:
        return True

    def _check_questions(self) -> None:
        settings = self.settings
        questions, drawable = settings.verify.questions, len(self.inputs.weights)
        if self.evolves and self.inputs.rl.steps > settings.evolve_every and drawable < questions:
            raise ValueError(
                f"rl.tasks.settings.verify.questions is {questions}, but {self.domain} has only {drawable} training tasks to "
                f"verify instructions on; lower it, raise curate.train, or set evolve_every to 0"
            )

    @property
    def domain(self) -> str:
        return next(iter(self.inputs.tasks.values())).domain

    @property
    def evolves(self) -> bool:
        """Whether the population changes at all."""
        return self.settings.evolve_every > 0 and self.settings.population > 1

    @property
    def best(self) -> Instruction:
        """Of highest weight, the oldest of ties."""
        return min(self.population, key=lambda one: (-one.weight, one.number))

    def _shares(self) -> list[float]:
        return shares([one.weight for one in self.population], self.settings.temperature, self.settings.explore)

    def _task(self, task: Task, one: Instruction, more: str = "") -> Task:
        """The task under an instruction. A prompt that does not change keeps its id, unless `more` marks another use of it."""
        same = one.text == QUESTION and not more
        return instructed(task, one.text, task.task_id if same else f"{task.task_id}{_MARK}{one.number:04d}{more}")

    def begin(self, step: int) -> None:
        """Evolve, if it is due; wait for a later step where the buffer leaves too few questions to verify candidates on."""
        if self.evolves and step > 0 and step % self.settings.evolve_every == 0:
            self.due = True
        if not self.due:
            return
        if len(self.unseen()) < self.settings.verify.questions:
            self.counts["steps_waited"] += 1
            return
        self.due = False
        self.evolve(step)

    def draw(self, *key: object, count: int | None = None, without: Collection[str] = ()) -> list[Task]:
        left_out = {self.drawn[task_id][0] for task_id in without}
        if count is None:
            self.drawn = {}
        found, probabilities = [], self._shares()
        for task in super().draw(*key, count=count, without=left_out):
            one = self.population[pick(probabilities, stream("instruction", *key, task.task_id).random())]
            made = self._task(task, one)
            self.drawn[made.task_id] = (task.task_id, one.number)
            found.append(made)
        return sorted(found, key=lambda task: task.task_id)

    def observe(self, step: int, episodes: Sequence[Episode]) -> None:
        rewards: dict[int, list[float]] = {}
        outcomes: dict[str, list[float]] = {}
        before = dict(self.sampler.success)
        for episode in episodes:
            task_id, number = self.drawn[episode.task_id]
            rewards.setdefault(number, []).append(episode.reward - self.settings.centre * before[task_id])
            outcomes.setdefault(task_id, []).append(self.outcome(episode))
            turns = [Turn(turn.action, turn.action_key, turn.observation, turn.accepted) for turn in episode.turns]
            prompt = self.inputs.tasks[task_id].prompt
            self.buffer.add(number, task_id, prompt, turns, episode.reward, episode.success)
        self.sampler.observe(outcomes)
        probabilities = self._shares()
        self.population = attributed(self.population, rewards, self.settings.rate)
        self._metrics = {
            "instructions": float(len(self.population)),
            "instruction_entropy": entropy(probabilities),
            "instruction_used": float(len(rewards)),
            "instruction_weight": self.best.weight,
            "instruction_best": float(self.best.number),
        }

    # ---- evolution -----------------------------------------------------------------------------------------------------------

    def evolve(self, step: int) -> None:
        """Prune, propose, verify and merge."""
        settings = self.settings
        survivors = halved(self.population, settings.keep, settings.min_trials)
        self.counts["pruned"] += len(self.population) - len(survivors)
        self.population = survivors
        room = min(settings.population - len(survivors), settings.verify.accept_top)
        candidates = self.checked(self.propose(step), step) if room > 0 else []
        if not candidates:
            return
        scores = self.verified([self.best, *candidates], step)
        least = scores[0]
        passed = [(one, score) for one, score in zip(candidates, scores[1:], strict=True) if score >= least]
        self.counts["below_baseline"] += len(candidates) - len(passed)
        passed.sort(key=lambda pair: (-pair[1], pair[0].number))
        mean = sum(one.weight for one in survivors) / len(survivors)
        for one, _ in passed[:room]:
            self.population.append(Instruction(one.number, one.text, mean, 0, one.origin, one.parent, step))
        self.counts["accepted"] += len(passed[:room])

    def propose(self, step: int) -> list[tuple[str, int]]:
        """(text, parent's number) of the candidates; the parents are the best instructions, in turn."""
        editor = self.settings.editor
        ranked = sorted(self.population, key=lambda one: (-one.weight, one.number))
        parents = [ranked[place % len(ranked)] for place in range(self.settings.candidates)]
        failures = [self._failures(parent, editor.failures, step, place) for place, parent in enumerate(parents)]
        if editor.kind == "server":
            texts = [parent.text for parent in parents]
            written = by_server(texts, failures, editor.server, self.settings.max_words, self.inputs.root)
        else:
            edit = by_rules if editor.kind == "rules" else by_chance
            draws = [stream("instruction.edit", *self.inputs.key, step, place) for place in range(len(parents))]
            written = [edit(*given) for given in zip((one.text for one in parents), failures, draws, strict=True)]
        self.counts["written"] += len(written)
        return [(text, parent.number) for text, parent in zip(written, parents, strict=True)]

    def _failures(self, parent: Instruction, count: int, step: int, place: int) -> Sequence[Any]:
        """A random `count` of the worst 4 * count failures."""
        found = self.buffer.failures(parent.number, 4 * count)
        return permutation(found, "instruction.failures", *self.inputs.key, step, place)[:count]

    def checked(self, candidates: Sequence[tuple[str, int]], step: int) -> list[Instruction]:
        """The candidates that are worth an episode: instructions that are new, short enough and tell no answer."""
        known, kept = {one.text for one in self.population}, []
        for text, parent in candidates:
            reason = fault(text, self.settings.max_words)
            if reason is None and text in known:
                reason = "known"
            if reason is None and self._tells(text):
                reason = "tells_answer"
            if reason is not None:
                self.counts[reason] += 1
                continue
            known.add(text)
            kept.append(Instruction(self.written, text, 0.0, 0, self.settings.editor.kind, parent, step))
            self.written += 1
        return kept

    @cached_property
    def _answers(self) -> list[str]:
        """All that training tasks accept as an answer."""
        found = dict.fromkeys(answer for task in self.inputs.tasks.values() for answer in accepted_answers(task.spec))
        return list(found)

    def _tells(self, text: str) -> bool:
        """Whether a text contains an answer of a training task."""
        return leaks(text.replace(QUESTION, " "), *self._answers)

    def unseen(self) -> list[str]:
        """Ids of the questions that may be drawn and that the buffer does not hold, sorted."""
        held = {one.task_id for one in self.buffer.episodes}
        return sorted(task_id for task_id in self.inputs.weights if task_id not in held)

    def verified(self, instructions: Sequence[Instruction], step: int) -> list[float]:
        """The mean reward of each instruction under the current policy, on the same `verify.questions` unseen questions."""
        verify = self.settings.verify
        chosen = permutation(self.unseen(), "instruction.verify", *self.inputs.key, step)[: verify.questions]
        requests, owner = [], {}
        for one in instructions:
            for task_id in chosen:
                task = self._task(self.inputs.tasks[task_id], one, f"-verify-{step}")
                owner[task.task_id] = one.number
                requests += [EpisodeRequest(task, attempt, task.task_id) for attempt in range(verify.rollouts)]
        rewards: dict[int, list[float]] = {one.number: [] for one in instructions}
        for episode in self.inputs.play(requests, None):
            rewards[owner[episode.task_id]].append(episode.reward)
        self.counts["verifying_episodes"] += len(requests)
        return [sum(rewards[one.number]) / len(rewards[one.number]) for one in instructions]

    # ---- reports and state ---------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def report(self) -> dict[str, Any]:
        ranked = sorted(self.population, key=lambda one: (-one.weight, one.number))
        return {"instructions": {"population": [asdict(one) for one in ranked], "counts": dict(sorted(self.counts.items()))}}

    def save(self, folder: Path) -> None:
        """The best instruction, with which evaluate plays the policy."""
        write_instruction(folder, self.domain, self.best.text)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "population": [asdict(one) for one in self.population],
            "written": self.written,
            "buffer": self.buffer.state_dict(),
            "due": self.due,
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.population = [Instruction(**one) for one in state["population"]]
        self.written, self.counts, self.due = state["written"], Counter(state["counts"]), state["due"]
        self.buffer.load_state_dict(state["buffer"])


def entropy(probabilities: Sequence[float]) -> float:
    """In nats."""
    return -sum(share * math.log(share) for share in probabilities if share > 0)


SOURCE = Instructions
