"""Plays frozen panels: every model makes the same attempts at the same tasks with the same random keys.

An attempt's random stream depends on (seed, "evaluate", task, attempt, turn) and not on the model, so models are compared with
common random numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stages.agent.instructions import QUESTION, instructed
from stages.agent.player import Player, open_player
from stages.agent.scaffold import Scaffold
from stages.agent.team import read_team
from stages.curation.panel import Panel, make_panel, read_panel
from stages.engine.engine import Engine, EngineSettings, Sampling
from stages.environments.protocol import Domain, Environment
from stages.environments.registry import load_domain
from stages.evaluation.replaced import Replaced
from stages.evaluation.stored_episodes import packed
from stages.records.episode import Episode, Owner, TurnRecord, conversations, episode_row, read_tasks
from stages.records.task import Split, Task
from stages.records.tools import calls_by_tool

if TYPE_CHECKING:
    from stages.agent.active_episode import EpisodeRequest
    from stages.agent.best_of_n import Ranking
    from stages.evaluation.settings import Evaluate, TreeSearch

STREAM = "evaluate"
SAMPLES = 2
"""Sample episodes per job: so many successes and so many failures."""
EVALUATION_SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("domain", pa.string()),
        ("task_id", pa.string()),
        ("attempt", pa.int32()),
        ("cluster", pa.string()),
        ("panel", pa.string()),
        ("policy_hash", pa.string()),
        ("success", pa.bool_()),
        ("reward", pa.float64()),
        ("turns", pa.int32()),
        ("tokens", pa.int32()),
        ("accepted", pa.float64()),
        ("cost", pa.float64()),
        ("difficulty", pa.float64()),
        ("stop_reason", pa.string()),
        ("answer", pa.string()),
        ("solution", pa.string()),
    ]
)
"""One row per (model, task, attempt). `tokens`: sampled by the policy, draws that were not played included, or by all members of
a team; `accepted`: share of actions the environment understood; `answer`: that of the attempt's last action, in domains with
answers; `solution`: equal for attempts that solved the task in the same way (see `solution_of`), null for a failure."""


@dataclass(frozen=True)
class Settings:
    """Settings of all jobs of an evaluation."""

    seed: int
    sampling: Sampling
    engine: EngineSettings
    scaffold: Scaffold = field(default_factory=Scaffold)
    environment_processes: int = 0
    """Processes that hold the environments; 0: this one."""


@dataclass(frozen=True)
class BestOf:
    """A model plays the best of `n` actions that it draws at each turn, or (by reward) of `n` episodes."""

    by: str
    """q | value | logprob | vote | reward."""
    n: int
    scorers: Path
    """q: the folder with each domain's Q-model; value, reward: that with each domain's policy and its values."""
    reference: Path
    """q: the policy that Q-models were made from."""
    per_token: bool = False
    """value, logprob: scores per token."""

    @classmethod
    def of(cls, by: str, evaluate: Evaluate, models: Path) -> BestOf:
        """As `evaluate` in params.yaml has it, with what lies in the folder `models`."""
        scorers, best_of = models / ("rl" if by in ("value", "reward") else "q"), evaluate.best_of
        return cls(by, best_of.n, scorers, models / "sft", best_of.per_token and by in ("value", "logprob"))

    def hash(self, policy_hash: str, domains: Sequence[str]) -> str:
        """16 hex digits that name a model together with how it chooses."""
        read = domains if self.by in ("q", "value", "reward") else []
        files = [file for domain in read for file in sorted((self.scorers / domain).rglob("*")) if file.is_file()]
        digest = hashlib.sha256(f"{policy_hash}+{self.by}{self.n}{' per token' * self.per_token}".encode())
        for file in files:
            digest.update(file.relative_to(self.scorers).as_posix().encode())
            with file.open("rb") as handle:
                while block := handle.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Job:
    """Attempts of one model at some tasks of one panel: what is played together and checkpointed together."""

    folder: Path
    policy_hash: str
    """Of the model, including its selection of actions, if any."""
    best_of: BestOf | None
    panel: str
    domain: str
    environment: Mapping[str, Any]
    worlds: Path
    tasks: tuple[Task, ...]
    attempts: int
    index: int
    instruction: str = QUESTION
    """What the model is played with (stages/agent/instructions.py)."""
    examples: tuple[Mapping[str, str], ...] = ()
    """See `EpisodeRequest.examples`."""
    plain: bool = False
    """Whether conversations are plain text (stages/agent/plain_text.py)."""
    search: TreeSearch | None = None
    """How the model looks ahead (stages/evaluation/tree_search.py); None: it plays what it draws."""
    replaced: Replaced | None = None
    """Members of the team that are replaced (stages/evaluation/coalition_play.py); None: none."""

    @property
    def name(self) -> str:
        """Names the job's checkpoint."""
        return f"{self.policy_hash}-{self.domain}-{self.panel}-{self.index:03d}"

    @property
    def draws(self) -> int:
        """Episodes played for each attempt."""
        return self.best_of.n if self.best_of is not None and self.best_of.by == "reward" else 1

    @property
    def episodes(self) -> int:
        return len(self.tasks) * self.attempts


@dataclass
class Outcome:
    """A job's rows of EVALUATION_SCHEMA, without `model`, and rows of EPISODE_SCHEMA for a few sample episodes."""

    rows: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    episodes: bytes = b""
    """All episodes, as `stages.evaluation.stored_episodes.packed` writes them."""


def load_panels(curated: Path, domains: Sequence[str], split: Split = "test", *, made_by: str = "curate") -> dict[str, Panel]:
    """The frozen panel of each domain below `curated`, or the tasks of another split under its settings. made_by: the stage.
    Raises FileNotFoundError or PanelMismatchError."""
    panels = {}
    for domain in domains:
        folder = curated / domain
        if not (folder / "panel.json").exists():
            raise FileNotFoundError(f"{folder / 'panel.json'} does not exist; run 'dvc repro {made_by}@{domain}' first")
        panels[domain] = read_panel(folder)
        if split != "test":
            played = load_domain(domain, panels[domain].environment)
            tasks = read_tasks(folder / "tasks.parquet", split)
            panels[domain] = make_panel(played, tasks, folder / "worlds", split)
    return panels


def jobs_of(
    folder: Path,
    policy_hash: str,
    panels: Mapping[str, Panel],
    curated: Path,
    attempts: int,
    chunk: int,
    best_of: BestOf | None = None,
) -> list[Job]:
    """One model's jobs, of about `chunk` episodes each; all attempts at a task are in one job."""
    jobs = []
    for domain, panel in panels.items():
        size = max(1, chunk // attempts)
        for index, start in enumerate(range(0, len(panel.tasks), size)):
            tasks = panel.tasks[start : start + size]
            worlds = curated / domain / "worlds"
            of_panel = (panel.hash, domain, panel.environment, worlds, tasks, attempts, index)
            jobs.append(Job(folder, policy_hash, best_of, *of_panel))
    return jobs


_loaded: dict[tuple[Path, EngineSettings, bool], Player] = {}
"""The last model, since its next panel usually follows."""


def _player(folder: Path, settings: EngineSettings, plain: bool) -> Player:
    """The model in `folder`, ready to play; the previous one is closed first."""
    if (folder, settings, plain) not in _loaded:
        unload()
        _loaded[folder, settings, plain] = open_player(folder, settings, text=True, plain=plain)
    return _loaded[folder, settings, plain]


def unload() -> None:
    """Close the last model."""
    for player in _loaded.values():
        player.close()
    _loaded.clear()


def solution_of(episode: Episode, task: Task, domain: Domain, acted: Sequence[TurnRecord]) -> str | None:
    """Hash (16 hex digits) of an episode's solution, as defined by the domain or else by the actions `acted` (lower case, single
    spaces); None for a failure."""
    if not episode.success:
        return None
    solution = getattr(domain, "solution", None)
    name = solution(task, [turn.action for turn in acted]) if solution else "\n".join(turn.action_key for turn in acted)
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def row_of(episode: Episode, task: Task, attempt: int, panel: str, domain: Domain, scaffold: Scaffold) -> dict[str, Any]:
    """An episode as an evaluation row, without the model's name. Thoughts are turns but not actions. `calls`, by tool, is no
    column of the table; only episodes with priced tools have it."""
    acted, answer = scaffold.acted(episode.turns), getattr(domain, "answer", None)
    return {
        "domain": task.domain,
        "task_id": task.task_id,
        "attempt": attempt,
        "cluster": task.unit,
        "panel": panel,
        "policy_hash": episode.policy_hash,
        "success": episode.success,
        "reward": episode.reward,
        "turns": sum(len(one.turns) for one in conversations([episode])),
        "tokens": sum(one.policy_tokens for one in conversations([episode])),
        "accepted": sum(turn.accepted for turn in acted) / len(acted) if acted else 0.0,
        "cost": sum(turn.cost for turn in episode.turns),
        "difficulty": task.difficulty,
        "stop_reason": episode.stop_reason,
        "answer": answer(acted[-1].action) if answer is not None and acted else None,
        "solution": solution_of(episode, task, domain, acted),
        **({"calls": calls} if (calls := calls_by_tool(episode.reward_terms)) else {}),
    }


def ranking(best_of: BestOf, domain: str, device: str) -> Ranking | None:
    """What orders the actions that are drawn in a domain; None where they vote."""
    from stages.agent.best_of_n import by_logprob, by_scorer, per_token

    if best_of.by == "vote":
        return None
    rank: Ranking = by_logprob
    if best_of.by == "q":
        from stages.values.q_model import load_q_model

        rank = by_scorer(load_q_model(best_of.scorers / domain, best_of.reference, device))
    if best_of.by == "value":
        from stages.values.token_q import load_token_q

        rank = by_scorer(load_token_q(best_of.scorers / domain, device))
    return per_token(rank) if best_of.per_token else rank


def engine_of(job: Job, player: Player, settings: Settings, domain: Domain, rejected: dict[int, int]) -> Engine:
    """The player's engine, or one that sees the newest turns alone, enforces the domain's constraint, or chooses among its
    draws, whose tokens it counts in `rejected` by the turn's key, those of the chosen one aside."""
    from stages.agent.constrained_engine import constrained

    engine: Engine = player.engine
    if settings.scaffold.window is not None:
        from stages.agent.history_window import WindowEngine

        engine = WindowEngine(engine, settings.scaffold.window)
    engine = constrained(engine, player.chat, domain, "evaluate", settings.engine.max_length)
    if job.best_of is None or job.best_of.by == "reward":
        return engine
    from stages.agent.best_of_n import BestOfEngine
    from stages.records.actions import action_key

    rank = ranking(job.best_of, job.domain, settings.engine.device)
    return BestOfEngine(
        engine, job.best_of.n, rank, lambda tokens: action_key(player.chat.action_text(tokens)), rejected.__setitem__
    )


def best_episodes(
    job: Job, episodes: Sequence[Episode], attempt: Mapping[str, int], engine: EngineSettings
) -> list[tuple[Episode, int]]:
    """Of the `draws` episodes of each attempt the one that the reward model scores highest, the first of equal ones, and the
    number of tokens that the policy sampled in the others.

    Draw d of attempt a is number a + d * attempts (`attempt`: episode id -> number), so that the first draws are the plain
    model's own attempts. Scores are of the tokens up to the policy's last one.
    """
    from stages.values.reward_model import best_of, load_reward_model

    assert job.best_of is not None
    model = load_reward_model(job.best_of.scorers / job.domain, engine.device)
    groups: dict[tuple[str, int], list[Episode]] = {}
    for episode in sorted(episodes, key=lambda episode: (episode.task_id, attempt[episode.episode_id])):
        groups.setdefault((episode.task_id, attempt[episode.episode_id] % job.attempts), []).append(episode)
    chosen = []
    for drawn in groups.values():
        best = drawn[best_of(model.scores([_acted_tokens(episode) for episode in drawn]))]
        chosen.append((best, sum(episode.policy_tokens for episode in drawn) - best.policy_tokens))
    return chosen


def _acted_tokens(episode: Episode) -> list[int]:
    """An episode's tokens up to the policy's last one; at least one."""
    last = max((place for place, owner in enumerate(episode.owner) if owner == Owner.POLICY), default=0)
    return episode.token_ids[: last + 1]


def _make(scaffold: Scaffold, domain: Domain, worlds: Path) -> Environment:
    return scaffold.around(domain.make(worlds))


def _episodes(
    job: Job, requests: Sequence[EpisodeRequest], domain: Domain, settings: Settings
) -> tuple[list[Episode], dict[str, dict[str, int]]]:
    """The episodes of all requests, and for those that took more than their own turns what else is in their rows: `tokens` of
    others, of draws that were not played, or of the search, and the search's `environment_steps`, which include the
    episode's."""
    from stages.agent.best_of_n import tokens_not_played
    from stages.agent.environment_pool import EnvironmentPool
    from stages.agent.rollout import Labels, collect
    from stages.evaluation.coalition_play import play_coalition
    from stages.evaluation.team_episodes import play_team

    player, engine_settings, scaffold = _player(job.folder, settings.engine, job.plain), settings.engine, settings.scaffold
    labels, team = Labels(settings.seed, job.policy_hash, job.panel, STREAM), read_team(job.folder, job.domain)
    with EnvironmentPool(partial(_make, scaffold, domain, job.worlds), settings.environment_processes) as pool:
        rejected: dict[int, int] = {}
        engine = engine_of(job, player, settings, domain, rejected)
        # All draws of an episode decode at once.
        width = max(1, engine_settings.slots // (job.best_of.n if job.best_of and job.best_of.by != "reward" else 1))
        limits: dict[str, Any] = {"max_length": engine_settings.max_length, "max_turns": scaffold.max_turns, "width": width}
        if team is not None:
            if job.search is not None:
                raise ValueError(
                    f"evaluate.models: a model that plays {job.domain} in a team can't look ahead; leave out its +search"
                )
            parts = (player, engine, pool, requests, settings.sampling, labels, engine_settings)
            together = play_team if job.replaced is None else partial(play_coalition, job.replaced)
            episodes, said = together(job.folder, team, *parts, **limits)
            return episodes, {name: {"tokens": tokens} for name, tokens in said.items()}
        if job.search is None:
            episodes = collect(engine, player.chat, pool, requests, settings.sampling, labels, **limits)
            return episodes, tokens_not_played(episodes, requests, labels, rejected)
        from stages.evaluation.tree_search import play_by_search

        return play_by_search(engine, player.chat, pool, requests, job.search, labels, **limits)


@lru_cache(maxsize=16)
def _domain(name: str, environment: str) -> Domain:
    """One for all models that play it, so that games and what their commands did are remembered. `environment`: JSON."""
    return load_domain(name, json.loads(environment))


def play(job: Job, settings: Settings) -> Outcome:
    """Play one job. Deterministic: rows sorted by task and attempt, the same whoever plays what else."""
    from stages.agent.rollout import attempts

    domain, scaffold = _domain(job.domain, json.dumps(job.environment, sort_keys=True)), settings.scaffold
    tasks = [scaffold.brief(instructed(task, job.instruction)) for task in job.tasks]
    requests = [replace(one, examples=job.examples) for one in attempts(tasks, job.attempts * job.draws)]
    episodes, more = _episodes(job, requests, domain, settings)
    attempt_of = {request.episode_id: request for request in requests}
    if job.draws > 1:
        numbers = {name: request.attempt for name, request in attempt_of.items()}
        chosen = best_episodes(job, episodes, numbers, settings.engine)
        episodes = [episode for episode, _ in chosen]
        more = {episode.episode_id: {"tokens": tokens} for episode, tokens in chosen}
    rows, kept = [], {True: 0, False: 0}
    samples, played = [], []
    for episode in episodes:
        request = attempt_of[episode.episode_id]
        attempt = request.attempt % job.attempts
        played.append({"attempt": attempt, **episode_row(episode)})
        row = row_of(episode, request.task, attempt, job.panel, domain, scaffold)
        extra = more.get(episode.episode_id, {})
        rows.append({**row, **extra, "tokens": row["tokens"] + extra.get("tokens", 0)})
        if kept[episode.success] < SAMPLES:
            kept[episode.success] += 1
            samples.append(episode_row(episode))
    return Outcome(rows, samples, packed(played))
