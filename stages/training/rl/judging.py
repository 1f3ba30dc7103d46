"""Asks the judge about a step's groups while rl trains: rewards for the batch, rows for the table, and the gap to the gold."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stages.agent.chat import Chat
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.parts.reward import EpisodeRewards
from stages.environments.protocol import Domain
from stages.judging.contract import Candidate, Cost, Judge, Question
from stages.judging.episodes import Read, attributes, candidate, gold_quality, last_message, named
from stages.judging.extraction import response
from stages.judging.gap import GapMonitor, group_agreement
from stages.judging.groups import Group, Scored, score_groups
from stages.judging.measures import order_measures
from stages.judging.principles import sampled, shaped, texts
from stages.judging.program import ProgramJudge
from stages.judging.reading import reading_judge
from stages.judging.server import ServerJudge
from stages.judging.table import judgment_row, write_judgments
from stages.records.episode import Episode
from stages.records.task import Task, opening
from stages.seeding import stream
from stages.training.common.processes import Processes

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


class EpisodeJudge:
    """Scores groups of episodes by the judge of section `rl.judge`. The first process asks; all get the same rewards."""

    def __init__(
        self,
        context: StageContext,
        algorithm: Algorithm,
        domain: Domain,
        tasks: Mapping[str, Task],
        processes: Processes,
        seed: int,
        chat: Chat,
    ) -> None:
        self.context, self.params, self.domain, self.tasks = context, algorithm.rl.judge, domain, tasks
        self.processes, self.seed, self.chat = processes, seed, chat
        self.scoring = self.params.scoring()
        self.read = self._reader()
        """What the judge reads of a message; None for the action alone."""
        self.gold: dict[str, float] = {}
        """Gold quality of the step's episodes, by episode."""
        self.perceived: dict[str, float] = {}
        """Quality of what the judge reads of them, which differs from the gold under `extract` alone."""
        self.attributes: dict[str, Mapping[str, float]] = {}
        """What principles are about, of the step's episodes; {} without principles."""
        self.judge = self._make()
        self.monitor = GapMonitor(self.params.warn_gap, self.params.stop_gap)
        self.rows: list[dict[str, Any]] = []
        """Of the table of judgments, all steps."""
        self.cost = Cost()
        self.seconds, self.calls = 0.0, 0
        """Of this process, for the log only: time spent on judging, and calls."""
        self._step, self._scored = -1, dict[str, Scored]()

    def _make(self) -> Judge:
        params = self.params
        if params.kind == "program":
            return ProgramJudge(params.program, self._perceived, self.seed)
        device, length = str(self.processes.device), self.context.params.model.max_length
        return reading_judge(params, str(self.context.domain), self.context.root, device, length)

    def _reader(self) -> Read | None:
        found = self.params.extract
        if found is None:
            return None
        thinking = self.context.params.model.thinking
        marker = found.marker if found.marker is not None else thinking.end if thinking is not None else ""
        return lambda text: response(text, marker, found.end, found.occurrence, found.strict, found.missing)

    def _quality(self, episode: Episode) -> float:
        """The quality of what the judge reads: of the gold, or of the response that `extract` finds."""
        if self.read is None or not hasattr(self.domain, "quality") or not episode.terminated:
            return self.gold[episode.episode_id]
        shown = candidate(episode, self.read)
        return float(self.domain.quality(self.tasks[episode.task_id], [*shown.steps, shown.answer]))

    def _perceived(self, question: Question, one: Candidate) -> float:
        """What a program judge perceives: the gold quality, or by principles the sum of the attributes that they name."""
        if self.params.principles is None:
            return self.perceived[one.name]
        names = {item.text: item.name for item in self.params.principles.items}
        known = self.attributes[one.name]
        return sum(named(known, names[text], "rl.judge.principles") for text in question.rubric.principles)

    def score(self, episodes: Sequence[Episode], greedy: Sequence[Episode], step: int) -> EpisodeRewards:
        """Rewards of the episodes, in order. Groups that this step has already judged keep their rewards. `greedy`: an episode
        per task, where it is the anchor."""
        if step != self._step:
            self._step, self._scored, self.gold, self.perceived, self.attributes = step, {}, {}, {}, {}
        members: dict[str, list[Episode]] = {}
        for episode in episodes:
            members.setdefault(episode.group_id, []).append(episode)
        anchors = {episode.task_id: episode for episode in greedy} if self.params.anchored_by_greedy else {}
        new = {name: found for name, found in sorted(members.items()) if name not in self._scored}
        entered = {name: [anchors[found[0].task_id], *found] if anchors else found for name, found in new.items()}
        for found in entered.values():
            self.gold |= {one.episode_id: gold_quality(self.domain, self.tasks[one.task_id], one) for one in found}
            self.perceived |= {one.episode_id: self._quality(one) for one in found}
            if self.params.principles is not None:
                self.attributes |= {one.episode_id: attributes(self.domain, self.tasks[one.task_id], one) for one in found}
        self._scored |= self._ask(entered)
        rewards: dict[str, float] = {}
        for name, found in members.items():
            entrants = self._scored[name].rewards[-len(found) :]  # the anchor, if it is not of the group, comes first
            rewards |= {episode.episode_id: reward for episode, reward in zip(found, entrants, strict=True)}
        given = [self._shaped(rewards[episode.episode_id], episode) for episode in episodes]
        return EpisodeRewards(torch.tensor(given, dtype=torch.float32))

    def _shaped(self, reward: float, episode: Episode) -> float:
        """The reward with the terms in length and end, where the section has them."""
        params = self.params
        if params.scheme != "pointwise":
            return reward
        written = [episode.token_ids[turn.start : turn.end] for turn in episode.turns[-1:]]
        stopped = bool(written) and not self.chat.closing_tokens(written[0])
        return params.scale * shaped(reward, episode.policy_tokens, stopped, params.length_bonus, params.unfinished_penalty)

    def _ask(self, entered: Mapping[str, Sequence[Episode]]) -> dict[str, Scored]:
        """Have the first process's judge score groups of episodes; every process gets the same."""
        own = []
        if self.processes.index == 0:
            started = time.monotonic()
            groups = [self._group(found) for found in entered.values()]
            scored, asked = score_groups(self.judge, groups, self.scoring, self.seed)
            self.seconds += time.monotonic() - started
            self.calls += sum(judgment.cost.calls for _, judgment in asked)
            own = [(scored, [judgment_row(self.judge, *pair, step=self._step + 1) for pair in asked])]
        ((scored, rows),) = self.processes.gather(own)
        self.rows += rows
        for row in rows:
            self.cost += Cost(row["calls"], row["tokens_in"], row["tokens_out"], row["money"])
        return dict(zip(entered, scored, strict=True))

    def _group(self, episodes: Sequence[Episode]) -> Group:
        task = self.tasks[episodes[0].task_id]
        reference = ""
        if self.params.references and hasattr(self.domain, "references"):
            reference = next(iter(self.domain.references(task)), "")
        candidates = tuple(candidate(one, self.read) for one in episodes)
        return Group(task.task_id, opening(task.prompt, ""), candidates, reference, self._principles(task.task_id))

    def _principles(self, task_id: str) -> tuple[str, ...]:
        """The principles that this step draws for a task, in words."""
        if (given := self.params.principles) is None:
            return ()
        names = sampled(given, self._step + 1, stream("judge.principles", self.seed, self._step, task_id))
        return texts(given.items, [(name, False) for name in names])

    def observe(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Metrics of the step's judgments, for the history; warns if judge and gold moved apart."""
        step_rows = [row for row in self.rows if row["step"] == self._step + 1]
        members: dict[str, list[Episode]] = {}
        for episode in episodes:
            members.setdefault(episode.group_id, []).append(episode)
        scores, gold, rewards, truths = [], [], [], []
        for name, found in sorted(members.items()):
            scored = self._scored[name]
            truth = [self.gold[episode.episode_id] for episode in found]
            scores += scored.scores[-len(found) :]
            gold += truth
            rewards.append(scored.rewards[-len(found) :])
            truths.append(truth)
        metrics = self.monitor.observe(scores, gold)
        if (warning := self.monitor.warning("rl.judge")) and self.context.main:
            print(f"{self.context.title}: {warning}", file=sys.stderr)
        measured = order_measures(step_rows)
        metrics |= {f"judge_{name}": measured[name] for name in ("failures", "flip_rate", "tie_rate", "position_bias")}
        metrics["judge_calls"] = float(sum(row["calls"] for row in step_rows))
        metrics["judge_money"] = float(sum(row["money"] for row in step_rows))
        metrics |= self._attribute_means(episodes) | self._response_means(episodes)
        agreement = group_agreement(rewards, truths)
        metrics["judge_agreement"] = 0.0 if agreement is None else agreement
        if self.speed is not None:
            self.context.metric("judge/calls_per_second", self.speed, self._step + 1)
        return metrics

    def _attribute_means(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Means over the step's episodes of what principles are about; {} without principles."""
        known = [self.attributes[one.episode_id] for one in episodes if one.episode_id in self.attributes]
        return {f"judge_{name}": sum(one[name] for one in known) / len(known) for name in sorted(known[0])} if known else {}

    def _response_means(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Under `extract`: share of episodes with a response, and words of the last message that are no response, and of it."""
        if self.read is None or self.params.extract is None:
            return {}
        read = [(last_message(one).split(), candidate(one, self.read).answer) for one in episodes]
        found = [(message, answer.split()) for message, answer in read if answer != self.params.extract.missing]
        thoughts = [max(0, len(message) - len(answer)) for message, answer in found]
        return {
            "judge_response_rate": len(found) / len(read),
            "judge_thought_words": sum(thoughts) / max(1, len(found)),
            "judge_response_words": sum(len(answer) for _, answer in found) / max(1, len(found)),
        }

    @property
    def speed(self) -> float | None:
        """Judge calls per second; None in a process that made none."""
        return self.calls / self.seconds if self.seconds > 0 else None

    @property
    def stops(self) -> bool:
        return self.monitor.stops

    def report(self) -> dict[str, Any]:
        """For reports/rl/<domain>.json."""
        statuses = [row["status"] for row in self.rows]
        found = {
            "judge": self.judge.name,
            "version": self.judge.version,
            "scheme": self.params.scheme,
            "judgments": len(self.rows),
            "calls": self.cost.calls,
            "tokens_in": self.cost.tokens_in,
            "tokens_out": self.cost.tokens_out,
            "money": self.cost.money,
            "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
            "warned_at": self.monitor.warned_at,
            **order_measures(self.rows),
        }
        return {"judge": found}

    def save(self, folder: Path) -> None:
        """Write the table of judgments, and print what they took."""
        if self.speed is not None:
            cost = f"cost {self.cost.money:.4g}"
            print(f"{self.context.title}: {self.cost.calls:,} judge calls, {self.speed:,.1f} a second, {cost}", flush=True)
        write_judgments(folder / "judgments.parquet", self.rows)

    def close(self) -> None:
        self.judge.close()

    def state_dict(self) -> dict[str, Any]:
        cost = self.cost
        return {
            "rows": self.rows,
            "monitor": self.monitor.state_dict(),
            "cost": [cost.calls, cost.tokens_in, cost.tokens_out, cost.money],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]
        self.monitor.load_state_dict(state["monitor"])
        self.cost = Cost(*state["cost"])
        if isinstance(self.judge, ServerJudge):
            self.judge.spent = self.cost
