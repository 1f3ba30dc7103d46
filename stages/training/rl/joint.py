"""Joint reinforcement learning: one policy learns all domains, which it plays in turn; the merge's rival at equal cost.

Every step is one of the stage rl's on the next domain, by that domain's settings (`rl` with the overrides of per_domain), until
each has had its `rl.steps` or budget. Domains share the weights alone; optimisers, learning rates, curricula and critics are
their own. All of it runs in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.agent.policy import Policy, load_policy, save_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.task_source import source_class
from stages.environments.registry import open_domain
from stages.records.episode import Episode, TurnRecord
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.tracker import Tracker
from stages.training.common.adapters import prepare_model, weight_precision, whole_model
from stages.training.common.loop import Job, Sums, Update, make_processes, run_loop
from stages.training.common.processes import Processes
from stages.training.rl.online import OnlineJob

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


class JointJob(Job):
    """The domains' jobs in turn: the next step is of the domain that has had the fewest, the first of several. `jobs`: domain ->
    its job, on one policy."""

    def __init__(self, jobs: Mapping[str, OnlineJob]) -> None:
        self.jobs = dict(jobs)
        self.rows: dict[str, list[dict[str, float]]] = {domain: [] for domain in jobs}
        """History of each domain."""
        self.learners = {}
        first = next(iter(self.jobs.values()))
        for domain, job in self.jobs.items():
            job.models.reference = first.models.reference
            self.learners |= {f"{name}/{domain}": learner for name, learner in job.learners.items()}
        self.played = next(iter(self.jobs))
        """The domain of the last step."""

    def _ended(self, domain: str) -> bool:
        done, job = len(self.rows[domain]), self.jobs[domain]
        return done >= job.rl.steps or (done > 0 and job.finished())

    def _next(self) -> str:
        """The domain of the step that is due."""
        return min((domain for domain in self.jobs if not self._ended(domain)), key=lambda domain: len(self.rows[domain]))

    def updates(self, step: int) -> Iterator[Update]:
        domain = self.played = self._next()
        for update in self.jobs[domain].updates(len(self.rows[domain])):
            yield replace(update, learner=f"{update.learner}/{domain}")

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        domain, done = self.played, len(self.rows[self.played])
        own = {label.replace(f"/{domain}", "", 1): values for label, values in sums.items()}
        row = self.jobs[domain].finish(done, own)
        self.rows[domain].append({"step": float(done + 1), **row})
        return {f"{domain}/{name}": value for name, value in row.items()}

    def finished(self) -> bool:
        return all(map(self._ended, self.jobs))

    def newest(self) -> Sequence[Mapping[str, Any]]:
        return self.jobs[self.played].newest()

    def report(self) -> dict[str, Any]:
        return {
            "steps": sum(map(len, self.rows.values())),
            "domains": {domain: {"steps": len(rows), **self.jobs[domain].report(rows)} for domain, rows in self.rows.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "jobs": {domain: job.state_dict() for domain, job in self.jobs.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]
        for domain, job in self.jobs.items():
            job.load_state_dict(state["jobs"][domain])


def _job(context: StageContext, policy: Policy, processes: Processes, domain: str) -> OnlineJob:
    """The stage rl's job of `domain`, whose method plays, as params.yaml is checked for (stages/algorithms/resolve.py)."""
    # Without a tracker: metrics of several domains would share their names.
    own = replace(context, domain=domain, tracker=Tracker())
    algorithm = resolve(own.section("rl"), own.params.model.max_length)
    if source_class(algorithm.rl.tasks.source).recorded:
        raise ValueError(
            f"per_domain.{domain}.rl.tasks.source {algorithm.rl.tasks.source} has answers of the policy that rl starts from, and "
            f"merge.method joint_rl trains it on other domains, too: set source to static, or choose another merge.method"
        )
    return OnlineJob(own, algorithm, policy, processes, open_domain(domain, own.params.per_domain[domain].environment))


def train(context: StageContext, base: Path, _: Any) -> dict[str, Any]:
    """Train data/models/merged from the policy in `base`; the domains' results, for the report."""
    params = context.params
    processes = make_processes(params.resources)
    policy = load_policy(base, device=str(processes.device), precision=weight_precision(params), attention="sdpa")
    prepare_model(policy.model, params, params.seed, "joint_rl")
    checkpoints = Checkpoints(context, classes=(Episode, TurnRecord))
    with ExitStack() as around:
        jobs = {domain: around.enter_context(closing(_job(context, policy, processes, domain))) for domain in params.domains}
        job, settings = JointJob(jobs), [own.rl for own in jobs.values()]
        steps, every = sum(rl.steps for rl in settings), min(rl.checkpoint_every for rl in settings)
        run_loop(context, checkpoints, job, steps, every, "training jointly", "joint_rl/")
        report = job.report()
    save_policy(
        whole_model(policy.model, base, bool(params.model.lora.rank)), policy.tokenizer, context.data / "models" / "merged"
    )
    checkpoints.clear()
    return {"joint_rl": report}
