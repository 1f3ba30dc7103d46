"""Rewards by a verifier while rl trains: verdicts on answers, normalised over the batch, and how often it is fooled."""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stages.algorithms.algorithm import Algorithm
from stages.algorithms.parts.reward import EpisodeRewards
from stages.environments.protocol import Domain
from stages.judging.episodes import candidate, gold_quality
from stages.judging.fit_verifier import divided, fit, labelled_pairs, logged_pairs, measured
from stages.judging.gap import GapMonitor
from stages.judging.generative import GenerativeVerifier
from stages.judging.verification import Verdict, contains, jaccard, last_line, verdict, zscores
from stages.records.episode import Episode, read_episodes, read_tasks
from stages.records.task import Task, opening
from stages.seeding import permutation, stream
from stages.training.rl.scoring import ReferenceTexts

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


def kept_for_fitting(task_ids: Iterable[str], share: float | None, seed: int) -> set[str]:
    """The tasks that are left to fitting the verifier, this share of all; `rl` trains on the others."""
    names = sorted(task_ids)
    return set(permutation(names, "verifier.fit_tasks", seed)[: round((share or 0.0) * len(names))])


class VerifiedRewards:
    """See stages.training.rl.scoring.EpisodeScorer. An episode's score depends on its task, its answer and its id alone."""

    def __init__(
        self, context: StageContext, algorithm: Algorithm, domain: Domain, tasks: Mapping[str, Task], device: str, seed: int
    ) -> None:
        self.context, self.params, self.tasks, self.seed = context, algorithm.rl.verifier, tasks, seed
        self.texts, self.held_out = ReferenceTexts(context, domain), dict[str, float]()
        """held_out: what the fitted verifier does on tasks that it was not fitted on."""
        self.domain, self.monitor = domain, GapMonitor(self.params.warn_gap, self.params.stop_gap)
        curated = read_tasks(context.data / "curated" / str(context.domain) / "tasks.parquet", "train")
        names = kept_for_fitting([task.task_id for task in curated], self.params.fit_share, seed)
        self.kept = {task.task_id: task for task in curated if task.task_id in names}
        self.verifier = self._make(device) if self.params.kind == "generative" else None
        self._step, self._scores = -1, dict[str, float]()
        """Of the step's episodes, by id, before they are normalised."""

    def _make(self, device: str) -> GenerativeVerifier:
        """The verifier in `verifier.path`, or one fitted on the references of the tasks that are kept for it, and measured on
        those that rl trains on; without kept ones, fitted and measured on the latter, each task in one of the two."""
        from stages.agent.policy import load_policy

        params, longest = self.params, self.context.params.model.max_length
        policy = load_policy(self.context.root / (params.path or "data/models/sft"), device=device)
        if params.path:
            return GenerativeVerifier(policy, params.labels, longest)
        verifier = GenerativeVerifier(replace(policy, model=copy.deepcopy(policy.model)), params.labels, longest)
        tasks = {**self.kept, **self.tasks}
        questions = {name: self._question(task) for name, task in tasks.items()}
        references = {name: self.texts.find(task) for name, task in tasks.items()}
        if params.fit_on == "rollouts":
            pairs = logged_pairs(questions, references, self._logged(tasks), self.seed)
        else:
            wrong = {name: self.domain.mistakes(task) for name, task in tasks.items()} if hasattr(self.domain, "mistakes") else {}
            pairs = labelled_pairs(questions, references, self.seed, wrong)
        if self.kept:
            known, held = ([pair for pair in pairs if (pair.task_id in self.kept) == fits] for fits in (True, False))
        else:
            known, held = divided(pairs, self.seed)
        with self.context.progress("fitting the verifier", 1, "model"):
            fit(verifier, known, params.fit_steps, params.fit_rate, self.seed)
        verifier.model.eval()
        self.held_out = measured(verifier, held)
        return verifier

    def _logged(self, tasks: Mapping[str, Task]) -> dict[str, list[tuple[str, bool]]]:
        """Answers of the stage rollout to the tasks, and whether the environment calls them successes."""
        found: dict[str, list[tuple[str, bool]]] = {}
        for episode in read_episodes(self.context.data / "rollouts" / str(self.context.domain) / "episodes.parquet"):
            if episode.task_id in tasks:
                found.setdefault(episode.task_id, []).append((self._read(episode), bool(episode.success)))
        return found

    @staticmethod
    def _question(task: Task) -> str:
        return opening(task.prompt, "")

    def _read(self, episode: Episode) -> str:
        answer = candidate(episode).answer
        return last_line(answer) if self.params.read == "last_line" else answer

    def _score(self, episode: Episode) -> float:
        """Of the answer beside one of the task's references, fixed by the task: the same for every kind, so that a comparison of
        kinds is not one of how much they are told."""
        task, answer, params = self.tasks[episode.task_id], self._read(episode), self.params
        reference = stream("verifier.reference", self.seed, task.task_id).choice(self.texts.of(task, "verifier"))
        if not answer:
            return 0.0
        if params.kind == "contains":
            return float(contains(reference, answer, params.most_words))
        if params.kind == "jaccard":
            return jaccard(reference, answer)
        return self._verdict(task, reference, answer, episode.episode_id).score(params.score, params.other)

    def _verdict(self, task: Task, reference: str, answer: str, name: str) -> Verdict:
        assert self.verifier is not None
        ((right, wrong),) = self.verifier.logprobs([self.verifier.prompt_tokens(self._question(task), reference, answer)])
        drawn = stream("verifier.drawn", self.seed, self._step, name).random()
        return verdict(right, wrong, float(drawn), self.params.renormalise)

    def score(self, episodes: Sequence[Episode], greedy: Sequence[Episode], step: int) -> EpisodeRewards:
        """Normalised over `episodes`, so that groups that join the step change the rewards of all."""
        if step != self._step:
            self._step, self._scores = step, {}
        for episode in episodes:
            if episode.episode_id not in self._scores:
                self._scores[episode.episode_id] = self._score(episode)
        scores = [self._scores[episode.episode_id] for episode in episodes]
        if self.params.normalise == "batch":
            scores = zscores(scores)
        return EpisodeRewards(torch.tensor(scores, dtype=torch.float32))

    def observe(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """The mean score, and how the verifier does against the environment's own outcome: false positives over failures, false
        negatives over successes."""
        scores = [self._scores[episode.episode_id] for episode in episodes]
        accepted = {True: list[bool](), False: list[bool]()}
        for episode, score in zip(episodes, scores, strict=True):
            accepted[bool(episode.success)].append(score >= 0.5)
        answers = [len(self._read(episode).split()) for episode in episodes]
        gold = [gold_quality(self.domain, self.tasks[episode.task_id], episode) for episode in episodes]
        gap = self.monitor.observe(scores, gold)["judge_gap"]
        for said in (self.monitor.warning("rl.verifier"), self.monitor.ending("rl.verifier")):
            if said and self.context.main:
                print(f"{self.context.title}: {said}", file=sys.stderr)
        return {
            "verifier_gap": gap,
            "verifier_score": statistics.fmean(scores),
            "verifier_score_std": statistics.pstdev(scores),
            "verifier_false_positive_rate": sum(accepted[False]) / max(len(accepted[False]), 1),
            "verifier_false_negative_rate": accepted[True].count(False) / max(len(accepted[True]), 1),
            "verifier_answer_words": statistics.fmean(answers),
        }

    @property
    def stops(self) -> bool:
        return self.monitor.stops

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": self.params.kind, "warned_at": self.monitor.warned_at}
        if self.verifier is not None:
            found |= {"version": self.verifier.version, "fitted": not self.params.path, "held_out": self.held_out}
        return {"verifier": found}

    def save(self, folder: Path) -> None:
        """Writes no table."""

    def close(self) -> None:
        """Holds nothing open."""

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The fit is repeated, with the same result."""
        self.monitor.load_state_dict(state["monitor"])
