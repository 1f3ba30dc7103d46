"""train_step_p64, _p192, _p448: one optimiser step (forward, backward, clipping, AdamW) on fixed trajectories, against TRL.

4 prompts with 8 answers of 64 tokens each. Both sides get the same weights, token ids, masks and advantages; the scenario fails
if loss or gradients differ. TRL's micro-batch is chosen by trial; ours is the default of params.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import trl_side
from benchmarks.measure import Options, Result, Side, alternate, fastest, rounded
from benchmarks.models import load, make_model, named, sizes
from benchmarks.processes import ALONE, apart, candidates, consecutive, own_layout
from stages.runtime.team import Team
from stages.seeding import stream

PROMPTS = (64, 192, 448)
ANSWER = 64
TOLERANCE = 1e-5
"""Largest relative difference of losses and of gradients (by their norms)."""
SHIFT = 0.1
"""Shift of the behaviour log-probabilities when comparing the sides: on-policy, with advantages that sum to 0, the loss is 0 and
has no relative difference."""
LEARNING_RATE = 1e-6
AGAINST = "TRL GRPOTrainer, Dr. GRPO"


class DisagreementError(RuntimeError):
    """The two sides do not compute the same step."""


def trajectories(vocabulary: int, prompt: int, answer: int, tasks: int, group: int) -> list[Any]:
    """Episodes of random tokens: `tasks` prompts with `group` answers each; rewards 0 and 1, both in every group."""
    from stages.records.episode import Episode, Owner, TurnRecord

    rng = stream("benchmarks.trajectories", prompt, answer, tasks, group)
    episodes = []
    for task in range(tasks):
        opening = [rng.randrange(vocabulary) for _ in range(prompt)]
        for attempt in range(group):
            episode = Episode(f"{task}/{attempt}", str(task), "toy", str(task), 0, "", "", 1.0, 1.0, 0)
            episode.append(opening, Owner.PROMPT, -1)
            episode.append([rng.randrange(vocabulary) for _ in range(answer)], Owner.POLICY, 0, [0.0] * answer)
            episode.reward = float(rng.random() < 0.5) if attempt > 1 else float(attempt)
            episode.turns = [TurnRecord("", "", True, episode.reward, 0.0, "", "", prompt, prompt + answer)]
            episodes.append(episode)
    return episodes


@dataclass(frozen=True)
class Method:
    """LoRA's rank (0: all weights), gradient checkpointing, tokens of our micro-batch (0: the default of params.yaml)."""

    rank: int = 0
    checkpointing: bool = False
    tokens_per_batch: int = 0

    @property
    def alpha(self) -> int:
        return 2 * self.rank


class Ours:
    """The policy's learner of the rl stage, on one prepared batch."""

    def __init__(
        self,
        options: Options,
        size: str,
        prompt: int,
        answer: int,
        tasks: int,
        group: int,
        method: Method = Method(),
        team: Team = ALONE,
    ) -> None:
        from stages.agent.settings import Lora
        from stages.algorithms.algorithm import resolve
        from stages.params import load_params
        from stages.training.common.adapters import prepare_model, weight_precision
        from stages.training.common.batches import trajectory_batch
        from stages.training.common.ledger import Ledger
        from stages.training.common.loop import Learner, make_processes
        from stages.training.common.optimiser import make_optimiser
        from stages.training.rl.models import Models
        from stages.training.rl.policy_updates import PolicyUpdates

        params = load_params(options.root / "params.yaml")
        section = params.rl.model_copy(update={"algorithm": "grpo", "group_size": group})
        loss = {"aggregation": "constant", "constant_length": answer}
        keys = {"advantage": {"std": "none"}, "loss": loss, "max_grad_norm": 1.0}
        section = section.model_validate({**section.model_dump(), **keys})
        tokens = method.tokens_per_batch or params.resources.tokens_per_batch
        resources = {"device": options.device, "precision": options.precision, "tokens_per_batch": tokens}
        lora = Lora(rank=method.rank, alpha=method.alpha or Lora().alpha)
        shape = {"lora": lora, "gradient_checkpointing": method.checkpointing}
        params = params.model_copy(
            update={"resources": params.resources.model_copy(update=resources), "model": params.model.model_copy(update=shape)}
        )
        algorithm, processes = resolve(section), make_processes(params.resources, team if team.count > 1 else None)
        self.weights = weight_precision(params)
        model, tokenizer = load(make_model(options, size), "sdpa", options.device, self.weights)
        prepare_model(model, params, params.seed, "benchmarks")
        self.factors = {name: value for name, value in model.named_parameters() if method.rank and value.requires_grad}
        randomise(self.factors)
        models = Models.make(algorithm, model, None, processes, tokens)
        batch = trajectory_batch(trajectories(len(tokenizer), prompt, answer, tasks, group))
        # On-policy: behaviour log-probabilities from the weights being trained.
        own = models.logprobs(models.reference, batch, list(range(batch.size)), 1.0)
        self.batch = algorithm.prepare(models.annotate(batch.with_(logprobs_old=own), algorithm))
        self.shifted = self.batch.with_(logprobs_old=(own - SHIFT * self.batch.advantages.sign()) * batch.mask)
        self.compared = PolicyUpdates(models, algorithm, Ledger())  # compares with the behaviour log-probabilities of `shifted`
        self.maker = PolicyUpdates(models, algorithm, Ledger(), first=True)  # as rl does
        self.model, self.method, self.tokens_per_batch = model, method, tokens
        optimiser = make_optimiser(model, LEARNING_RATE, 0.0, betas=(0.9, 0.999))
        self.learner = Learner(model, optimiser, constant, 1.0, processes)

    def gradient(self) -> tuple[float, dict[str, Any]]:
        """Loss on the shifted batch, and gradients by parameter name; the weights stay as they are."""
        learner, clipping, sums = self.learner, self.learner.max_grad_norm, {}
        learner.max_grad_norm, learner.schedule = math.inf, lambda update: 0.0
        for update in self.compared.updates(self.shifted, 0, ("benchmarks",)):
            sums = learner.update(update.micro_batches, update.loss, update.on_tokens_trained)
        learner.max_grad_norm, learner.schedule = clipping, constant
        learner.optimiser.state.clear()
        return sums["loss"], pop_gradients(self.model)

    def run(self) -> float:
        """One step; returns this process's share of it."""
        batch = self.maker.rescored(self.batch, 0, ("benchmarks",))
        for update in self.maker.updates(batch, 0, ("benchmarks",)):
            self.learner.update(update.micro_batches, update.loss, update.on_tokens_trained)
        return 1 / self.learner.processes.count

    def side(self) -> Side:
        gradient = self.gradient()  # before `run` changes the weights
        return Side(f"bellwether tokens_per_batch={self.tokens_per_batch}", self.run, facts=lambda: gradient)


def constant(update: int) -> float:
    """The learning rate of every update."""
    return LEARNING_RATE


def randomise(factors: Mapping[str, Any]) -> None:
    """Initialise LoRA's B factors with small random values: while they are 0, the A factors have no gradient."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, factor in factors.items():
            if ".lora_B." in name:
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.01)


def pop_gradients(model: Any, prefix: str = "") -> dict[str, Any]:
    """Copy and clear the gradients; keys are parameter names without `prefix`."""
    gradients = {
        name.removeprefix(prefix): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return gradients


class Theirs:
    """TRL's trainer on our batch's tokens and advantages, in micro-batches of `rows // accumulate`; with several processes, on
    this one's rows."""

    def __init__(
        self,
        options: Options,
        size: str,
        ours: Ours,
        group: int,
        accumulate: int = 1,
        attention: str = "sdpa",
        team: Team = ALONE,
    ) -> None:
        batch, method = ours.batch, ours.method
        starts = int(batch.mask[0].int().argmax())
        answer = batch.token_ids.shape[1] - starts
        self.trainer = trl_side.make_trainer(
            *(options, make_model(options, size)),
            rows=batch.size,
            group=group,
            prompts=[{"prompt": "x"}] * batch.size,
            completion=answer,
            attention=attention,
            accumulate=accumulate,
            learning_rate=LEARNING_RATE,
            weights=ours.weights,
            checkpointing=method.checkpointing,
            adapters=adapters(method),
            processes=team.count,
        )
        copy_factors(self.trainer.model, ours.factors)
        tensors = {
            "prompt_ids": batch.token_ids[:, :starts],
            "prompt_mask": batch.token_ids[:, :starts].new_ones(batch.size, starts),
            "completion_ids": batch.token_ids[:, starts:],
            "completion_mask": batch.token_ids[:, starts:].new_ones(batch.size, answer),
            "advantages": batch.advantages[:, starts],
            "old_per_token_logps": ours.shifted.logprobs_old[:, starts:],
        }
        rows = consecutive(range(batch.size), team)
        self.shifted = {name: value[rows].to(options.device) for name, value in tensors.items()}
        self.batch = {name: value for name, value in self.shifted.items() if name != "old_per_token_logps"}
        self.label, self.count = f"trl {attention} micro-batch={batch.size // accumulate // team.count}", team.count

    def gradient(self) -> tuple[float, dict[str, Any]]:
        """As `Ours.gradient`."""
        from stages.engine.adapters import PREFIX

        return trl_side.losses(self.trainer, self.shifted), pop_gradients(self.trainer.model, PREFIX)

    def run(self) -> float:
        trl_side.update(self.trainer, self.batch)
        return 1 / self.count

    def side(self) -> Side:
        gradient = self.gradient()  # before `run` changes the weights
        return Side(self.label, self.run, facts=lambda: gradient)


def adapters(method: Method) -> Any:
    """peft's configuration of the LoRA that `stages.training.common.adapters` makes; None for none."""
    if not method.rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=method.rank, lora_alpha=method.alpha, target_modules="all-linear", lora_dropout=0.0, bias="none")


def copy_factors(model: Any, factors: Mapping[str, Any]) -> None:
    """Copy our LoRA factors into TRL's model."""
    from stages.engine.adapters import PREFIX

    theirs = {name.removeprefix(PREFIX): value for name, value in model.named_parameters() if value.requires_grad}
    if factors and set(theirs) != set(factors):
        raise DisagreementError(f"different LoRA factors are trained: {sorted(set(theirs) ^ set(factors))[:4]}")
    for name, factor in factors.items():
        theirs[name].data.copy_(factor.detach())


Gradient = tuple[float, dict[str, Any]]
"""Loss, and gradients by parameter name."""


def combined(facts: Sequence[Gradient]) -> Gradient:
    """The gradient that all processes of a side hold, and the mean of their losses."""
    return sum(loss for loss, _ in facts) / len(facts), facts[0][1]


def disagreement(mine: Gradient, other: Gradient) -> dict[str, float]:
    """Relative differences of the losses, of the concatenated gradients, and the largest of any parameter's gradient."""
    (loss, gradients), (their_loss, their_gradients) = mine, other
    if set(gradients) != set(their_gradients):
        raise DisagreementError(f"gradients of different parameters: {sorted(set(gradients) ^ set(their_gradients))[:4]}")
    apart = {name: float((value - their_gradients[name]).norm()) for name, value in gradients.items()}
    norms = {name: float(value.norm()) for name, value in gradients.items()}
    relative = sum(value**2 for value in apart.values()) ** 0.5 / sum(value**2 for value in norms.values()) ** 0.5
    return {
        "loss": abs(loss - their_loss) / abs(their_loss),
        "gradient": relative,
        "gradient_of_any_parameter": max(apart[name] / norms[name] for name in apart if norms[name] > 0),
        "gradient_norm": sum(value**2 for value in norms.values()) ** 0.5,
    }


def check(difference: dict[str, float], where: str, tolerance: float = TOLERANCE) -> None:
    """Raise DisagreementError if the two sides' losses or gradients differ by more than `tolerance`."""
    if max(difference["loss"], difference["gradient"]) > tolerance:
        raise DisagreementError(
            f"{where}: relative differences from TRL's loss and gradient are {difference['loss']:.2g} and "
            f"{difference['gradient']:.2g} (at most {tolerance:g}), so their times cannot be compared"
        )


SETTINGS = ((1, "sdpa"), (2, "sdpa"), (4, "sdpa"), (1, "eager"))
"""TRL's candidate settings: micro-batches and attention kernel."""


def measure_prompt(
    options: Options,
    size: str,
    prompt: int,
    method: Method = Method(),
    tolerance: float = TOLERANCE,
    groups: tuple[int, int] = (4, 8),
) -> Result:
    """groups: their number, and the episodes of each."""
    tasks, group, answer = options.size(groups[0], 2), options.size(groups[1], 2), options.size(ANSWER, 8)

    def ours(team: Team) -> Ours:
        return Ours(options, size, prompt, answer, tasks, group, method, team)

    def theirs(setting: tuple[int, str], team: Team) -> Side:
        return Theirs(options, size, ours(ALONE), group, *setting, team=team).side()

    mine = apart(lambda team: ours(team).side(), own_layout(options))
    other, trials = fastest(candidates([partial(theirs, setting) for setting in SETTINGS], options), options)
    difference = disagreement(combined(mine.facts()), combined(other.facts()))
    check(difference, f"{size}, prompts of {prompt} tokens", tolerance)
    samples = alternate(mine, other, options)
    notes = {
        "rows": tasks * group,
        "tokens": {"prompt": prompt, "answer": answer},
        "ours": mine.label,
        "theirs": other.label,
        "trials": trials,
        "difference": {name: rounded(value) for name, value in difference.items()},
    }
    mine.close()
    other.close()
    return Result("s", AGAINST, "seconds", *samples, notes=notes)


def measure(options: Options) -> dict[str, Result]:
    prompts = (24,) if options.quick else PROMPTS
    return {
        named(f"train_step_p{prompt}", size): measure_prompt(options, size, prompt)
        for size in sizes(options)
        for prompt in prompts
    }
