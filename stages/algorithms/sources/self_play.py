"""Search self-play (arXiv 2510.18821): in each step the policy proposes questions to known answers, with the domain's tools.
Those that pass the gate are what the solver, the same policy, is trained on, and its failures are the proposer's reward.

Answers come from curated tasks, whose questions are only shown as examples of the form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stages.agent.active_episode import EpisodeRequest
from stages.agent.prompts import load_prompt
from stages.algorithms.parts.curriculum import Curriculum
from stages.algorithms.parts.self_play import (
    REASONS,
    VALID,
    ProblemPool,
    Proposal,
    SelfPlaySettings,
    failed_rule,
    mixed_evidence,
    proposal_of,
    proposer_prompt,
    proposer_prompt_name,
    proposer_reward,
    target,
    without_kl_of_failures,
)
from stages.algorithms.sources.static import StaticTasks, TaskSampler
from stages.algorithms.task_source import SourceInputs, TaskSource
from stages.engine.engine import Sampling
from stages.environments.self_play import PROPOSER, READER, SelfPlayEnvironment
from stages.records.task import Task
from stages.runtime.validation import ParamsError
from stages.seeding import key64, stream

if TYPE_CHECKING:
    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.settings import Rl
    from stages.environments.protocol import Domain
    from stages.records.episode import Episode

SOLVER = "solver"
UNREADABLE = "rl.tasks.settings.gate.reader: rules needs a domain that reads evidence by rules (Domain.read); set it to policy"


class SelfPlay(TaskSource):
    """See the module. Raises ValueError for a domain whose tasks have no answers."""

    Settings = SelfPlaySettings
    roles = (PROPOSER,)
    role_parts: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        PROPOSER: {"advantage.mean": "none", "advantage.std": "none", "sampling.temperature": 0.8}
    }
    main_role = SOLVER

    def __init__(self, inputs: SourceInputs) -> None:
        super().__init__(inputs)
        self.settings: SelfPlaySettings = inputs.rl.tasks.settings
        proposals = self.settings.proposer.n
        if proposals and inputs.rl.tasks_per_step % proposals:
            raise ValueError(
                f"rl.tasks_per_step is {inputs.rl.tasks_per_step}, and rl.tasks.settings.proposer.n is {proposals}: make it a "
                f"multiple, so that every proposal has a slot"
            )
        if lacking := sorted(name for name, task in inputs.tasks.items() if not task.spec.get("answer")):
            raise ValueError(
                f"rl.tasks.source: self_play asks for questions to known answers, and task {lacking[0]} has none: set it to "
                f"static, or domains to ones whose episodes end with an answer, such as search and factbook"
            )
        if proposals and self.settings.gate.reader == "rules" and not hasattr(inputs.domain, "read"):
            raise ValueError(UNREADABLE)
        self.static = StaticTasks(inputs)
        answers = inputs.rl.tasks_per_step // max(proposals, 1)
        self.answers = TaskSampler(inputs.weights, {}, Curriculum(kind="uniform"), answers, inputs.weights)
        self.pool = ProblemPool(self.settings.completion)
        self.known: set[str] = set()
        """Hashes of all questions that passed the gate so far."""
        self.proposed: list[Episode] = []
        self.problems: dict[str, str] = {}
        """Of the step: proposer's episode that passed the gate -> its problem's task id."""
        self.tasks: dict[str, Task] = {}
        self.dummies: set[str] = set()
        self._metrics: dict[str, float] = {}

    @classmethod
    def fits(cls, domain: Domain, rl: Rl) -> None:
        if not hasattr(domain, "answer"):
            raise ParamsError(
                f"rl.tasks.source: self_play asks for questions to known answers, and episodes of domain {domain.name} do not "
                f"end with one; set it to static (rl.algorithm: grpo), or domains to ones such as search and factbook"
            )
        settings = rl.tasks.settings
        if not settings.proposer.n:
            return
        if settings.gate.reader == "rules" and not hasattr(domain, "read"):
            raise ParamsError(UNREADABLE)
        if (found := next(_unproposable(domain.settings), None)) is not None:
            raise ParamsError(
                f"rl.tasks.source: self_play has the policy search and propose questions, and per_domain.{domain.name}."
                f"environment.{found[0]} {found[1]}: change it, or set rl.tasks.settings.proposer.n to 0"
            )

    @classmethod
    def weighted(cls, rl: Rl) -> bool:
        return not rl.tasks.settings.proposer.n

    @staticmethod
    def make(domain: Domain, worlds: Path) -> SelfPlayEnvironment:
        return SelfPlayEnvironment(domain.make(worlds))

    # ---- a step -------------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        proposer = self.settings.proposer
        self.proposed, self.problems, self.tasks, self.dummies, self._metrics = [], {}, {}, set(), {}
        if not proposer.n:
            return
        key = (*self.inputs.key, step)
        seeds = [self.inputs.tasks[name] for name in self.answers.draw("self_play", *key)]
        asked = [self._proposer_task(seed, step, place) for place, seed in enumerate(seeds)]
        requests = [EpisodeRequest(task, number, task.task_id, PROPOSER) for task in asked for number in range(proposer.n)]
        self.proposed = self.inputs.play(requests, self._role_sampling())
        origin = {task.task_id: seed for task, seed in zip(asked, seeds, strict=True)}
        proposals = [proposal_of(origin[one.task_id].spec["answer"], one.turns) for one in self.proposed]
        reasons = [failed_rule(proposal, self.settings.gate) for proposal in proposals]
        reasons = self._read(proposals, reasons, [origin[episode.task_id] for episode in self.proposed], step)
        fresh: list[Task] = []
        for slot, (episode, proposal, reason) in enumerate(zip(self.proposed, proposals, reasons, strict=True)):
            if not reason:
                task = self._problem(proposal, origin[episode.task_id], f"ssp-{step:05d}-{slot:03d}")
                self.problems[episode.episode_id] = task.task_id
                fresh.append(task)
        filled = self._complete([origin[episode.task_id] for episode in self.proposed], fresh, step)
        self.tasks = {task.task_id: task for task in [*fresh, *filled]}
        self._count(proposals, reasons, len(filled))

    def _role_sampling(self) -> Sampling:
        from stages.algorithms.registry import composition
        from stages.algorithms.resolve import role_section

        rl = self.inputs.rl
        return Sampling(**role_section(composition(rl.algorithm), rl, PROPOSER).sampling.model_dump())

    def _proposer_task(self, seed: Task, step: int, place: int) -> Task:
        rng = stream("self_play.examples", *self.inputs.key, step, place)
        text = proposer_prompt(self.settings.proposer, self.inputs.domain, seed, self.inputs.tasks, rng)
        spec = {**seed.spec, "role": PROPOSER}
        return replace(seed, task_id=f"propose-{step:05d}-{place:03d}", prompt=text, spec=spec)

    def _read(self, proposals: Sequence[Proposal], reasons: Sequence[str], seeds: Sequence[Task], step: int) -> list[str]:
        """The reasons, with "reader" for those that passed the rules and whose answer the reader did not find."""
        gate, found = self.settings.gate, list(reasons)
        passed = [place for place, reason in enumerate(reasons) if not reason]
        if gate.reader == "none" or not passed:
            return found
        evidence = {}
        for place in passed:
            rng = stream("self_play.evidence", *self.inputs.key, step, place)
            others = [one.evidence for other, one in enumerate(proposals) if other != place and one.evidence]
            evidence[place] = mixed_evidence(proposals[place].evidence, others, gate.noisy_blobs, rng)
        right = self._by_rules if gate.reader == "rules" else self._by_policy
        for place, accepted in right(proposals, seeds, evidence, step).items():
            found[place] = "" if accepted else "reader"
        return found

    def _by_rules(
        self, proposals: Sequence[Proposal], seeds: Sequence[Task], evidence: Mapping[int, str], step: int
    ) -> dict[int, bool]:
        domain: Any = self.inputs.domain
        return {
            place: domain.answer(f"answer {domain.read(proposals[place].question, text)}")
            == domain.answer(f"answer {proposals[place].answer}")
            for place, text in evidence.items()
        }

    def _by_policy(
        self, proposals: Sequence[Proposal], seeds: Sequence[Task], evidence: Mapping[int, str], step: int
    ) -> dict[int, bool]:
        gate, names = self.settings.gate, {}
        requests = []
        for place, text in evidence.items():
            prompt = load_prompt(gate.prompt).fill(evidence=text, question=proposals[place].question)
            spec = {**seeds[place].spec, "role": READER}
            task = replace(seeds[place], task_id=f"read-{step:05d}-{place:03d}", prompt=prompt, spec=spec)
            names[task.task_id] = place
            requests.append(EpisodeRequest(task, 0, task.task_id, READER))
        sampling = Sampling(temperature=gate.reader_temperature, max_tokens=gate.reader_tokens)
        right: dict[int, bool] = {}
        for episode in self.inputs.play(requests, sampling):
            answered = any(turn.accepted for turn in episode.turns)
            right[names[episode.task_id]] = episode.success if answered else gate.on_reader_error == "accept"
        return right

    def _problem(self, proposal: Proposal, seed: Task, name: str) -> Task:
        domain: Any = self.inputs.domain
        prompt = domain.asked(proposal.question) if hasattr(domain, "asked") else proposal.question
        return replace(seed, task_id=name, prompt=prompt)

    def _complete(self, seeds: Sequence[Task], fresh: Sequence[Task], step: int) -> list[Task]:
        """Tasks for the slots of failed proposals."""
        completion, rng = self.settings.completion, stream("self_play.completion", *self.inputs.key, step)
        count = len(seeds) - len(fresh)
        filled: list[Task] = []
        if completion.strategy == "reuse":
            filled = [Task(**problem["task"]) for problem in self.pool.draw(count, rng)]
        elif completion.strategy == "resample" and fresh:
            copies = [rng.choice(list(fresh)) for _ in range(count)]
            filled = [replace(task, task_id=f"{task.task_id}-copy{number:03d}") for number, task in enumerate(copies)]
        for number in range(count - len(filled)):
            seed = seeds[number]
            prompt = load_prompt(completion.prompt).fill(answer=target(seed.spec["answer"]))
            filled.append(replace(seed, task_id=f"dummy-{step:05d}-{number:03d}", prompt=prompt))
            self.dummies.add(filled[-1].task_id)
        return filled

    def draw(self, *key: object, count: int | None = None, without: Collection[str] = ()) -> list[Task]:
        """The step's problems; beyond them, there are no further ones."""
        if not self.settings.proposer.n:
            return self.static.draw(*key, count=count, without=without)
        return [task for name, task in sorted(self.tasks.items()) if name not in without][:count]

    # ---- after it -----------------------------------------------------------------------------------------------------------

    def observe(self, step: int, episodes: Sequence[Episode]) -> None:
        if not self.settings.proposer.n:
            self.static.observe(step, episodes)
            return
        outcomes: dict[str, list[float]] = {}
        for episode in episodes:
            outcomes.setdefault(episode.task_id, []).append(float(episode.reward > 0))
        rates = {name: sum(found) / len(found) for name, found in outcomes.items()}
        for episode in self.proposed:
            rate = rates.get(self.problems.get(episode.episode_id, ""))
            reward = self.settings.proposer.fail_reward if rate is None else proposer_reward(rate, self.settings.proposer)
            episode.reward_terms = {VALID: float(rate is not None), **({} if rate is None else {"solve_rate": rate})}
            if episode.turns:
                episode.reward = episode.turns[-1].reward = reward
        solved = [rates[name] for name in self.problems.values() if name in rates]
        if solved:
            self._metrics["solve_rate"] = sum(solved) / len(solved)
        self._metrics["proposer_reward"] = sum(episode.reward for episode in self.proposed) / len(self.proposed)
        kept = [name for name in sorted(rates) if name not in self.dummies and "-copy" not in name]
        self.pool.add([{"task_id": name, "rate": rates[name], "task": asdict(self.tasks[name])} for name in kept])
        self.pool.end_step(step)
        self._metrics["pool"] = float(len(self.pool.problems))

    def _count(self, proposals: Sequence[Proposal], reasons: Sequence[str], filled: int) -> None:
        """The step's columns about proposals."""
        count = len(proposals)
        questions = [one.question.lower() for one, reason in zip(proposals, reasons, strict=True) if not reason]
        hashes = {f"{key64('self_play.question', text):016x}" for text in questions}
        self._metrics = {
            "valid": len(questions) / count,
            "valid_by_rules": sum(reason in ("", "reader") for reason in reasons) / count,
            **{f"gate/{name}": reasons.count(name) / count for name in REASONS},
            "queries": sum(len(one.queries) for one in proposals) / count,
            "dummies": len(self.dummies) / count,
            "reused": (filled - len(self.dummies)) / count,
        }
        if questions:
            words = [pair for text in questions for pair in zip(text.split(), text.split()[1:], strict=False)]
            self._metrics |= {
                "diversity": len(hashes) / len(questions),
                "distinct_bigrams": len(set(words)) / max(len(words), 1),
                "new_questions": len(hashes - self.known) / len(questions),
            }
        self.known |= hashes

    def role_episodes(self) -> Mapping[str, Sequence[Episode]]:
        return {PROPOSER: self.proposed}

    @property
    def roles_first(self) -> bool:
        return self.settings.updates.first == "proposer"

    @property
    def combined(self) -> bool:
        return self.settings.updates.combine

    def learns(self, role: str, step: int) -> bool:
        updates = self.settings.updates
        return (updates.proposer and step >= self.settings.proposer.warmup_steps) if role == PROPOSER else updates.solver

    def credited(self, role: str, batch: TrajectoryBatch) -> TrajectoryBatch:
        return without_kl_of_failures(batch)

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def report(self) -> dict[str, Any]:
        settings = self.settings
        own = proposer_prompt_name(settings.proposer, self.inputs.domain)
        names = {own, settings.gate.prompt, settings.completion.prompt}
        prompts = {name: load_prompt(name).sha256 for name in sorted(names)}
        return {"self_play": {"questions": len(self.known), "prompts": prompts}}

    def state_dict(self) -> dict[str, Any]:
        return {"static": self.static.state_dict(), "pool": self.pool.problems, "known": sorted(self.known)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.static.load_state_dict(state["static"])
        self.pool.problems, self.known = state["pool"], set(state["known"])


def _unproposable(settings: Any) -> Iterator[tuple[str, str]]:
    """Settings of a domain under which no question passes the gate, each with what it does to proposers."""
    mode = getattr(settings, "tool_mode", None)
    if getattr(settings, "closed_book", False):
        yield "closed_book", "leaves proposers no tool"
    if mode not in (None, "real"):
        yield f"tool_mode: {mode}", "leaves proposers without results of a tool, which are the evidence for their questions"
    if getattr(settings, "constraint", None) is not None:
        yield "constraint", "has no state for their `question <text>`"


SOURCE = SelfPlay
