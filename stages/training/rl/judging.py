"""Asks the judge about a step's groups while rl trains: rewards for the batch, rows for the table, and the gap to the gold."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stages.agent.chat import Chat
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.parts.reward import EpisodeRewards
from stages.environments.protocol import Domain
from stages.judging.contract import Candidate, Cost, Judge, JudgeError, Question
from stages.judging.episodes import (
    Read,
    attributes,
    candidate,
    gold_quality,
    last_message,
    named,
    perceived_quality,
    read_actions,
)
from stages.judging.extraction import reader
from stages.judging.gap import GapMonitor, group_agreement
from stages.judging.groups import Group, Scored, score_groups
from stages.judging.measures import order_measures
from stages.judging.measuring import believed
from stages.judging.principles import read_at_step, shaped
from stages.judging.program import ProgramJudge
from stages.judging.reading import reading_judge
from stages.judging.server import ServerJudge
from stages.judging.table import judgment_row, write_judgments
from stages.records.episode import Episode
from stages.records.task import Task, opening
from stages.training.common.processes import Processes

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext

NO_MARKER = (
    "no episode of the first step has a response between the markers of rl.judge.extract, so all rewards are for missing "
    "responses, or for whole messages. Check marker and end against what the policy learnt to write (model.thinking, "
    "curate.thoughts)"
)
"""Warns of markers that the policy never writes."""


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
        thinking, extract = context.params.model.thinking, self.params.extract
        self.read: Read | None = None if extract is None else reader(extract, thinking)
        """What the judge reads of a message; None for the action alone."""
        self.marked: Read | None = None if extract is None else reader(extract, thinking, strict=True)
        """The response between its markers, whether or not the judge is lenient."""
        self.gold: dict[str, float] = {}
        """Gold quality of the step's episodes, by episode."""
        self.perceived: dict[str, float] = {}
        """Quality of what the judge reads of them, which differs from the gold under `extract` alone."""
        self.attributes: dict[str, Mapping[str, float]] = {}
        """What principles are about, of the step's episodes; {} without principles."""
        self.checked: dict[str, Mapping[str, bool]] = {}
        """Which items of the domain's checklist the step's episodes meet; {} without it."""
        if self._own_items and not hasattr(domain, "checklist"):
            raise ValueError(
                f"rl.judge.scheme: checklist needs rl.judge.items, since {context.domain} has no checklist of its own; set items "
                f"and a judge that reads text, or another scheme"
            )
        self.judge = self._make()
        self.measured = self._measured()
        self.monitor = GapMonitor(self.params.warn_gap, self.params.stop_gap)
        self.rows: list[dict[str, Any]] = []
        """Of the table of judgments, all steps."""
        self.cost = Cost()
        self.seconds, self.sent = 0.0, 0
        """Of this process, for the log only: time spent on judging, and requests or passes."""
        self._step = -1
        self._forget()

    def _forget(self) -> None:
        """Drop what is known of an earlier step."""
        self.gold, self.perceived, self.attributes, self.checked = {}, {}, {}, {}
        self._judged: set[str] = set()
        self._rewards: dict[str, float] = {}
        self._scores: dict[str, float] = {}
        self._errors: list[float] = []

    @property
    def _own_items(self) -> bool:
        """Whether checklists are the domain's own."""
        return self.params.scheme == "checklist" and self.params.items is None

    def _make(self) -> Judge:
        params = self.params
        if params.kind == "program":
            return ProgramJudge(params.program, self._perceived, self.seed, self._met)
        device, length = str(self.processes.device), self.context.params.model.max_length
        return reading_judge(params, str(self.context.domain), self.context.root, device, length)

    def _measured(self) -> dict[str, Any] | None:
        """What is known of the judge before it is asked, if the section names labelled pairs. Raises JudgeError in every process
        if it agrees too little with them, or if there are none."""
        if (given := self.params.labelled_pairs) is None:
            return None
        own: list[tuple[dict[str, Any], str]] = []
        if self.processes.index == 0:
            try:
                own = [(believed(self.judge, self.params, self.seed, given, self.context.root), "")]
            except (JudgeError, ValueError, OSError) as error:
                own = [({}, str(error))]
        ((found, problem),) = self.processes.gather(own)
        if problem:
            raise JudgeError(problem)
        return dict(found)

    def _perceived(self, question: Question, one: Candidate) -> float:
        """What a program judge perceives: the gold quality, or by principles the sum of the attributes that they name."""
        if self.params.principles is None:
            return self.perceived[one.name]
        names = {item.text: item.name for item in self.params.principles.items}
        known = self.attributes[one.name]
        return sum(named(known, names[text], "rl.judge.principles") for text in question.rubric.principles)

    def _met(self, question: Question, one: Candidate) -> list[bool]:
        """Which items a candidate meets, for a program judge."""
        return [self.checked[one.name][item] for item in question.rubric.items]

    def score(self, episodes: Sequence[Episode], greedy: Sequence[Episode], step: int) -> EpisodeRewards:
        """Rewards of the episodes, in order. Groups that this step has already judged keep their rewards. `greedy`: an episode
        per task, where it is the anchor."""
        if step != self._step:
            self._step = step
            self._forget()
        members: dict[str, list[Episode]] = {}
        for episode in episodes:
            members.setdefault(episode.group_id, []).append(episode)
        # In the first step the greedy episode has the id of the group's first.
        greedy = [replace(one, episode_id=f"{one.episode_id}/greedy") for one in greedy]
        anchors = {episode.task_id: episode for episode in greedy} if self.params.anchored_by_greedy else {}
        new = {name: found for name, found in sorted(members.items()) if name not in self._judged}
        entered = {name: [anchors[found[0].task_id], *found] if anchors else found for name, found in new.items()}
        for found in entered.values():
            self._perceive(found)
        for name, scored in self._ask(entered).items():
            ids = [episode.episode_id for episode in entered[name]]
            self._rewards |= dict(zip(ids, scored.rewards, strict=True))
            self._scores |= dict(zip(ids, scored.scores, strict=True))
            self._errors += scored.errors
        self._judged |= set(entered)
        given = [self._shaped(self._rewards[episode.episode_id], episode) for episode in episodes]
        return EpisodeRewards(torch.tensor(given, dtype=torch.float32))

    def _perceive(self, episodes: Sequence[Episode]) -> None:
        """Note what programs know of a group's episodes."""
        task = self.tasks[episodes[0].task_id]
        self.gold |= {one.episode_id: gold_quality(self.domain, task, one) for one in episodes}
        self.perceived |= {one.episode_id: perceived_quality(self.domain, task, one, self.read) for one in episodes}
        if self.params.principles is not None:
            self.attributes |= {one.episode_id: attributes(self.domain, task, one, self.read) for one in episodes}
        if self._own_items:
            assert hasattr(self.domain, "checklist")
            self.checked |= {one.episode_id: self.domain.checklist(task, read_actions(one, self.read)) for one in episodes}

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
            started, before = time.monotonic(), self.judge.sent
            groups = [self._group(found) for found in entered.values()]
            scored, asked = score_groups(self.judge, groups, self.scoring, self.seed)
            self.seconds += time.monotonic() - started
            self.sent += self.judge.sent - before
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
        principles = read_at_step(self.params.principles, self.seed, self._step, task.task_id)
        items = tuple(self.checked[episodes[0].episode_id]) if self._own_items else ()
        return Group(task.task_id, opening(task.prompt, ""), candidates, reference, principles, items)

    def observe(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Metrics of the step's judgments, for the history; warns if judge and gold moved apart."""
        step_rows = [row for row in self.rows if row["step"] == self._step + 1]
        members: dict[str, list[Episode]] = {}
        for episode in episodes:
            members.setdefault(episode.group_id, []).append(episode)
        groups = [found for _, found in sorted(members.items())]
        rewards, scores, gold = (
            [[known[episode.episode_id] for episode in found] for found in groups]
            for known in (self._rewards, self._scores, self.gold)
        )
        metrics = self.monitor.observe([one for found in scores for one in found], [one for found in gold for one in found])
        for said in (self.monitor.warning("rl.judge"), self.monitor.ending("rl.judge")):
            if said and self.context.main:
                print(f"{self.context.title}: {said}", file=sys.stderr)
        measured = order_measures(step_rows)
        metrics |= {f"judge_{name}": measured[name] for name in ("failures", "flip_rate", "tie_rate", "position_bias")}
        metrics["judge_calls"] = float(sum(row["calls"] for row in step_rows))
        metrics["judge_money"] = float(sum(row["money"] for row in step_rows))
        metrics |= self._attribute_means(episodes) | self._response_means(episodes)
        if self._errors:
            metrics["judge_strength_error"] = sum(self._errors) / len(self._errors)
        if (agreement := group_agreement(rewards, gold)) is not None:
            metrics["judge_agreement"] = agreement
        if self._step == 0 and metrics.get("judge_response_rate") == 0.0 and self.context.main:
            print(f"{self.context.title}: {NO_MARKER}", file=sys.stderr)
        if self.speed is not None:
            self.context.metric("judge/calls_per_second", self.speed, self._step + 1)
        return metrics

    def _attribute_means(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Means over the step's episodes of what principles are about; {} without principles."""
        known = [self.attributes[one.episode_id] for one in episodes if one.episode_id in self.attributes]
        return {f"judge_{name}": sum(one[name] for one in known) / len(known) for name in sorted(known[0])} if known else {}

    def _response_means(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Under `extract`: share of episodes whose last message has a response between its markers; of these, the mean number of
        words before the response and in it."""
        if self.marked is None or self.params.extract is None:
            return {}
        read = [(last_message(one).split(), candidate(one, self.marked).answer) for one in episodes]
        found = [(message, text.split()) for message, text in read if text.strip() and text != self.params.extract.missing]
        thoughts = [max(0, len(message) - len(text)) for message, text in found]
        return {
            "judge_response_rate": len(found) / len(read),
            "judge_thought_words": sum(thoughts) / max(1, len(found)),
            "judge_response_words": sum(len(text) for _, text in found) / max(1, len(found)),
        }

    @property
    def speed(self) -> float | None:
        """Requests or passes per second; None in a process that made none, as where all replies were stored."""
        return self.sent / self.seconds if self.sent and self.seconds > 0 else None

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
            **({} if self.measured is None else {"measured": self.measured}),
        }
        return {"judge": found}

    def save(self, folder: Path) -> None:
        """Write the table of judgments, hand it to the tracker, and print what they took."""
        self.judge.keep()
        if self.speed is not None:
            cost = f"cost {self.cost.money:.4g}"
            print(f"{self.context.title}: {self.cost.calls:,} judge calls, {self.speed:,.1f} a second, {cost}", flush=True)
        write_judgments(folder / "judgments.parquet", self.rows)
        self.context.artifact(folder / "judgments.parquet")

    def close(self) -> None:
        self.judge.close()

    def state_dict(self) -> dict[str, Any]:
        self.judge.keep()
        spent = self.judge.spent if isinstance(self.judge, ServerJudge) else Cost()
        return {
            "rows": self.rows,
            "monitor": self.monitor.state_dict(),
            "cost": _amounts(self.cost),
            "spent": _amounts(spent),
            "version": self.judge.version,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises JudgeError if another judge gave the rewards so far."""
        if state["version"] != self.judge.version:
            raise JudgeError(
                f"{self.context.title} stopped with judge {state['version']}, and rl.judge is {self.judge.version}: its model or "
                f"settings were replaced. Restore them, or delete .bellwether/checkpoints/{self.context.title} to begin again"
            )
        self.rows = state["rows"]
        self.monitor.load_state_dict(state["monitor"])
        self.cost = Cost(*state["cost"])
        if isinstance(self.judge, ServerJudge):
            self.judge.spent = Cost(*state["spent"])


def _amounts(cost: Cost) -> list[float]:
    return [cost.calls, cost.tokens_in, cost.tokens_out, cost.money]
