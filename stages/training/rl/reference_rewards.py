"""Rewards from references while rl trains: the chain of each task, the rewards of its episodes, and what they are made of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stages.algorithms.algorithm import Algorithm
from stages.algorithms.parts.references import References
from stages.algorithms.parts.reward import EpisodeRewards
from stages.environments.protocol import Domain
from stages.judging.episodes import candidate, gold_quality
from stages.judging.gap import group_agreement
from stages.judging.references import (
    StyleChecks,
    content_reward,
    extracted,
    keyword_share,
    length_penalty,
    length_ratio,
    style_reward,
)
from stages.records.episode import Episode
from stages.records.reward_chain import RewardChain
from stages.records.task import Task
from stages.seeding import stream
from stages.training.rl.scoring import ReferenceTexts

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


def corrupted(chain: RewardChain, share: float, *key: object) -> RewardChain:
    """The chain with about this share of its key words replaced by words that occur nowhere; the draws depend on `key`. A word is
    replaced everywhere or nowhere."""
    words = sorted({word for point in chain.key_points for keywords in point for word in keywords})
    rng = stream("references.corrupted", *key)
    other = {word: f"{word[::-1]}x" for word in words if rng.random() < share}
    points = tuple(tuple(tuple(other.get(word, word) for word in keywords) for keywords in point) for point in chain.key_points)
    return replace(chain, key_points=points)


def cut(chain: RewardChain, most: int) -> RewardChain:
    """The chain with key words of more than `most` words cut into parts of that many, without empty ones."""

    def parts(keyword: str) -> list[str]:
        words = keyword.split()
        return [" ".join(words[start : start + most]) for start in range(0, len(words), most)] if len(words) > most else [keyword]

    points = tuple(
        tuple(tuple(part for word in keywords for part in parts(word)) for keywords in point) for point in chain.key_points
    )
    return replace(chain, key_points=points)


def own_reward(chain: RewardChain, checks: StyleChecks) -> float:
    """Mean of content and style of the best of the chain's own references; the content alone without demands on style. 1 for a
    chain without references, which are then no evidence against it."""
    rewards = (
        weighed(content_reward(chain, text), style_reward(chain, text, checks), chain, 0.5, 0.5) for text in chain.references
    )
    return max(rewards, default=1.0)


def weighed(content: float, style: float, chain: RewardChain, content_weight: float, style_weight: float) -> float:
    """content_weight * content + style_weight * style. A chain without demands on style gives their weight to the content, so
    that its answers can earn as much as any."""
    if not chain.styles and content_weight:
        return (content_weight + style_weight) * content
    return content_weight * content + style_weight * style


class Chains:
    """The reward chains of tasks, by the settings `params`: the domain's, or by rules from references."""

    def __init__(self, domain: Domain, texts: ReferenceTexts, params: References) -> None:
        self.domain, self.texts, self.params = domain, texts, params

    def make(self, task: Task) -> RewardChain:
        """Raises ValueError for a task without references."""
        if hasattr(self.domain, "reward_chain"):
            chain = self.domain.reward_chain(task)
        else:
            chain = extracted(self.texts.of(task, "references"))
        return cut(chain, self.params.max_keyword_words)

    def well_made(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks whose references reach `references.least_own_reward`. Those without references stay; who needs them says so.
        Raises ValueError if none is left."""
        least, checks = self.params.least_own_reward, StyleChecks()
        known = hasattr(self.domain, "reward_chain")
        try:
            kept = [
                task
                for task in tasks
                if not least or not (known or self.texts.find(task)) or own_reward(self.make(task), checks) >= least
            ]
        finally:
            checks.close()
        if tasks and not kept:
            raise ValueError(
                f"rl.references.least_own_reward is {least:g}, and on none of the {len(tasks)} training tasks does a reference "
                f"reach it; correct the domain's reward_chain or references, or lower it"
            )
        return kept


class ReferenceRewards:
    """See stages.training.rl.scoring.EpisodeScorer. Rewards are pure functions of task and answer."""

    stops = False

    def __init__(self, context: StageContext, algorithm: Algorithm, domain: Domain, tasks: Mapping[str, Task], seed: int) -> None:
        self.params, self.domain, self.tasks, self.seed = algorithm.rl.references, domain, tasks, seed
        self.checks, self.made = StyleChecks(), Chains(domain, ReferenceTexts(context, domain), self.params)
        self._chains: dict[str, RewardChain] = {}
        self._step, self._parts = -1, dict[str, dict[str, float]]()
        """Of the step's episodes: content, style, reward and what is reported."""

    def chain(self, task: Task) -> RewardChain:
        """The task's chain. Raises ValueError for a task without references."""
        if task.task_id not in self._chains:
            chain = self.made.make(task)
            share = self.params.corrupted
            self._chains[task.task_id] = corrupted(chain, share, self.seed, task.task_id) if share else chain
        return self._chains[task.task_id]

    def _scored(self, task: Task, episode: Episode) -> dict[str, float]:
        """The reward and its parts."""
        params, chain, answer = self.params, self.chain(task), candidate(episode).answer
        stuffed = keyword_share(chain, answer)
        if params.content == "random":
            drawn = stream("references.random", self.seed, episode.episode_id).random()
            return {
                "reward": drawn,
                "content": drawn,
                "style": 0.0,
                "keyword_share": stuffed,
                "words": float(len(answer.split())),
            }
        compatible = params.matching == "reference"
        content = content_reward(chain, answer, params.content, compatible, params.case_sensitive)
        if params.max_keyword_share is not None and stuffed > params.max_keyword_share:
            content = 0.0
        style = style_reward(chain, answer, self.checks)
        reward = weighed(content, style, chain, params.content_weight, params.style_weight)
        if params.length_penalty:
            reward -= params.length_penalty * length_penalty(length_ratio(chain, answer))
        parts = {"content": content, "style": style, "keyword_share": stuffed, "words": float(len(answer.split()))}
        return {"reward": max(0.0, reward), **parts}

    def score(self, episodes: Sequence[Episode], greedy: Sequence[Episode], step: int) -> EpisodeRewards:
        if step != self._step:
            self._step, self._parts = step, {}
        for episode in episodes:
            if episode.episode_id not in self._parts:
                self._parts[episode.episode_id] = self._scored(self.tasks[episode.task_id], episode)
        rewards = [self._parts[episode.episode_id]["reward"] for episode in episodes]
        return EpisodeRewards(torch.tensor(rewards, dtype=torch.float32))

    def observe(self, episodes: Sequence[Episode]) -> dict[str, float]:
        parts = [self._parts[episode.episode_id] for episode in episodes]
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group_id, []).append(episode)
        found = [members for _, members in sorted(groups.items())]
        rewards = [[self._parts[one.episode_id]["reward"] for one in members] for members in found]
        gold = [[gold_quality(self.domain, self.tasks[one.task_id], one) for one in members] for members in found]
        agreement = group_agreement(rewards, gold)
        names = ("reward", "content", "style", "keyword_share", "words")
        return {
            **{f"references_{name}": statistics.fmean(part[name] for part in parts) for name in names},
            "references_gold": statistics.fmean(value for members in gold for value in members),
            **({} if agreement is None else {"references_agreement": agreement}),
        }

    def report(self) -> dict[str, Any]:
        params = self.params
        return {"references": {"content": params.content, "tasks": len(self._chains), "undecided_styles": self.checks.failures}}

    def save(self, folder: Path) -> None:
        """Writes no table."""

    def close(self) -> None:
        self.checks.close()

    def state_dict(self) -> dict[str, Any]:
        return {"undecided": self.checks.failures, "tasks": sorted(self._chains)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.checks.failures = state["undecided"]
        for task_id in state["tasks"]:
            self.chain(self.tasks[task_id])
