"""rollout_multi_turn: episodes of 8 turns in a scripted environment, action tokens per second, against TRL's own tool loop.

Each turn is 16 action tokens (forced) and 16 observation tokens. Ours: `collect` and the batch of its episodes; TRL's:
`_generate_and_score_completions` with `environment_factory`, which re-encodes prompt and history in every turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks import trl_side
from benchmarks.measure import Options, Result, Side, alternate, fastest
from benchmarks.models import counting, forwarded_per_unit, load, make_model, named, sizes
from benchmarks.processes import ALONE, Build, apart, candidates, consecutive, own_layout, share
from benchmarks.toy import ToyChat, ToyEnvironment, ToyToolEnvironment, dataset_rows, toy_tasks
from stages.runtime.team import Team

ACTION, OBSERVATION, PROMPT = 16, 16, 64
AGAINST = "TRL GRPOTrainer, environment_factory, transformers generate"


@dataclass(frozen=True)
class Work:
    """Number of groups, episodes per group, turns; tokens per prompt, action and observation."""

    tasks: int
    group: int
    turns: int
    prompt: int = PROMPT
    action: int = ACTION
    observation: int = OBSERVATION

    @property
    def action_tokens(self) -> int:
        return self.tasks * self.group * self.turns * self.action

    @property
    def length(self) -> int:
        """Tokens of an episode."""
        return self.prompt + self.turns * self.action + (self.turns - 1) * self.observation


def work(options: Options) -> Work:
    return Work(tasks=options.size(8, 2), group=options.size(8, 2), turns=options.size(8, 2))


def ours(options: Options, size: str, work: Work, team: Team = ALONE, slots: int | None = None) -> Side:
    """The part of one process of `team`: every n-th group, as in rl."""
    from stages.agent.rollout import EnvironmentPool, Labels, attempts, collect
    from stages.engine.engine import Sampling
    from stages.engine.torch_engine import TorchEngine
    from stages.training.common.batches import trajectory_batch

    model, tokenizer = load(make_model(options, size), "sdpa", options.device, options.precision)
    tasks = share(toy_tasks(tokenizer, work.tasks, work.prompt, work.turns, work.observation), team)
    expected = work.action_tokens * len(tasks) // work.tasks
    width, longest = slots or len(tasks) * work.group, work.length + work.action
    # No stop token, so that all turns have the same length.
    engine = TorchEngine(model, [], width, longest)
    chat, pool = ToyChat(tokenizer), EnvironmentPool(ToyEnvironment)
    sampling = Sampling(max_tokens=work.action)

    def run() -> float:
        episodes = collect(
            *(engine, chat, pool, attempts(tasks, work.group), sampling, Labels(0)), max_length=longest, width=width
        )
        trajectory_batch(episodes)
        tokens = sum(episode.policy_tokens for episode in episodes)
        if tokens != expected or {len(episode.token_ids) for episode in episodes} != {work.length}:
            raise RuntimeError(f"{tokens} action tokens were sampled, expected {expected}")
        return tokens

    return counting(Side("bellwether", run), model)


def theirs(
    options: Options, size: str, work: Work, team: Team = ALONE, attention: str = "sdpa", cache: str | None = None
) -> Side:
    """The part of one process of accelerate's: consecutive groups, as in TRL."""
    _, tokenizer = load(make_model(options, size), attention)
    tasks = toy_tasks(tokenizer, work.tasks, work.prompt, work.turns, work.observation)
    rows = dataset_rows(tasks, work.group)
    trainer = trl_side.make_trainer(
        *(options, make_model(options, size)),
        rows=len(rows),
        group=work.group,
        prompts=rows,
        processes=team.count,
        completion=work.length - work.prompt,
        weights=options.precision,
        attention=attention,
        cache=cache,
        generation={"max_new_tokens": work.action, "min_new_tokens": work.action},
        environment=ToyToolEnvironment,
        tool_turns=work.turns - 1,
    )

    own = consecutive(rows, team)
    expected = work.action_tokens * len(own) // len(rows)

    def run() -> float:
        batch = trl_side.rollout(trainer, own)
        tokens = trl_side.action_tokens(batch)
        if tokens != expected or batch["completion_ids"].shape[1] != work.length - work.prompt:
            raise RuntimeError(f"TRL sampled {tokens} action tokens, expected {expected}")
        return tokens

    return counting(Side(f"trl {attention} cache={cache or 'dynamic'}", run), trainer.model)


def settings(options: Options, size: str, work: Work) -> list[Build]:
    """TRL's candidate settings: attention kernel and cache."""
    chosen = [("sdpa", None), ("eager", None), ("sdpa", "static")]
    return [partial(theirs, options, size, work, attention=attention, cache=cache) for attention, cache in chosen]


def measure_size(options: Options, size: str, plan: Work | None = None) -> Result:
    plan = plan or work(options)
    mine = apart(partial(ours, options, size, plan), own_layout(options))
    other, trials = fastest(candidates(settings(options, size, plan), options), options)
    ours_samples, theirs_samples = alternate(mine, other, options)
    notes = {
        "episodes": plan.tasks * plan.group,
        "turns": plan.turns,
        "tokens": {"prompt": plan.prompt, "action": plan.action, "observation": plan.observation},
        "trials": trials,
        "ours": mine.label,
        "theirs": other.label,
        "tokens_forwarded_per_action_token": {
            "ours": forwarded_per_unit(mine),
            "theirs": forwarded_per_unit(other),
        },
    }
    mine.close()
    other.close()
    return Result("action tokens/s", AGAINST, "rate", ours_samples, theirs_samples, notes=notes)


def measure(options: Options) -> dict[str, Result]:
    return {named("rollout_multi_turn", size): measure_size(options, size) for size in sizes(options)}
