"""sft: the base model learns from the demonstrations of all domains, with loss on the policy's tokens alone.

data/curated/<domain>/{tasks,demonstrations}.parquet, model.path -> data/models/sft, reports/sft/history.csv, reports/sft.json.
Training stops early when the loss on demonstrations of validation tasks no longer falls, and keeps the best weights. LoRA
adapters are merged into the weights at the end, so data/models/sft is always a full model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stages import params
from stages.records.episode import IMPORTED, Episode, read_episodes, read_tasks, write_json
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.stage import StageContext, stage_run
from stages.runtime.unlisted_domains import keep_only
from stages.seeding import permutation
from stages.tracking import open_tracker
from stages.training.sft.settings import Sft

if TYPE_CHECKING:
    from stages.agent.policy import Policy
    from stages.training.common.documents import Documents
    from stages.training.sft.hints import Specs
    from stages.training.sft.job import SftJob


def read_demonstrations(context: StageContext) -> dict[str, list[Episode]]:
    """Demonstrations by the split of their task, in the order of domains and files. Imported ones without a task are for
    training."""
    by_split: dict[str, list[Episode]] = {"train": [], "valid": []}
    for domain in context.params.domains:
        folder = context.data / "curated" / domain
        split_of = {task.task_id: task.split for task in read_tasks(folder / "tasks.parquet")}
        for episode in read_episodes(folder / "demonstrations.parquet"):
            split = split_of.get(episode.task_id, "train" if episode.policy_hash == IMPORTED else None)
            if split not in by_split:
                raise ValueError(
                    f"{folder / 'demonstrations.parquet'}: {episode.episode_id} demonstrates a {split} task; demonstrations must "
                    f"be of train or valid tasks"
                )
            by_split[split].append(episode)
    return by_split


def read_specs(context: StageContext) -> Specs:
    """(domain, task's id) -> the task's spec; {} unless demonstrations get hints, which must not contain its answers."""
    if not context.params.sft.guided:
        return {}
    folder = context.data / "curated"
    tasks = {domain: read_tasks(folder / domain / "tasks.parquet") for domain in context.params.domains}
    return {(domain, task.task_id): task.spec for domain, of_domain in tasks.items() for task in of_domain}


def draw(episodes: list[Episode], count: int | None, seed: int) -> list[Episode]:
    """At most `count` of each domain's `episodes`, drawn at random, in their order; all of them for None."""
    if count is None:
        return episodes
    drawn: set[str] = set()
    for domain in dict.fromkeys(episode.domain for episode in episodes):
        names = sorted(episode.episode_id for episode in episodes if episode.domain == domain)
        drawn.update(permutation(names, "sft.demonstrations", seed, domain)[:count])
    return [episode for episode in episodes if episode.episode_id in drawn]


def controlled(context: StageContext, policy: Policy, demonstrations: Documents | None) -> dict[str, Any]:
    """Fine-tune the policy to an assembly's preferences, if sft.control says so; the report's part on it."""
    params = context.params
    if params.sft.control.kind == "none":
        return {}
    from stages.training.sft.control import control

    micro_tokens = params.resources.tokens_per_batch
    found = control(policy, params.sft.control, demonstrations, params.model.max_length, params.seed, micro_tokens)
    for name, value in found.items():
        context.metric(f"control/{name}", value)
    return {"control": {"kind": params.sft.control.kind, **found}}


def keep_base(context: StageContext) -> None:
    """Without demonstrations, pass the base model on to the next stages."""
    from stages.agent.policy import load_policy, save_policy
    from stages.engine.architectures import check_served
    from stages.training.common.loop import write_history

    policy = load_policy(context.params.model.path, root=context.root)
    check_served(policy.folder, context.params.model.max_length)
    steered = controlled(context, policy, None)
    save_policy(policy.model, policy.tokenizer, context.data / "models" / "sft")
    write_history(context.reports / "sft" / "history.csv", [])
    none = {split: dict.fromkeys(context.params.domains, 0) for split in ("train", "valid")}
    report = {"steps": 0, "epochs": 0.0, "stopped_early": False, "demonstrations": none, "base_hash": policy.hash, **steered}
    write_json(context.reports / "sft.json", report)


def write_outputs(
    context: StageContext,
    policy: Policy,
    job: SftJob,
    history: list[dict[str, float]],
    demonstrations: dict[str, list[Episode]],
) -> None:
    """Write the trained model, the history and the report."""
    from stages.agent.policy import save_policy
    from stages.training.common.adapters import whole_model
    from stages.training.common.loop import write_history

    lora = bool(context.params.model.lora.rank)
    model = whole_model(policy.model if lora else job.trained_model, context.params.model.path, lora, context.root)
    steered = controlled(context, replace(policy, model=model), job.train)
    save_policy(model, policy.tokenizer, context.data / "models" / "sft")
    write_history(context.reports / "sft" / "history.csv", history)
    counts = {
        split: {domain: sum(episode.domain == domain for episode in episodes) for domain in context.params.domains}
        for split, episodes in demonstrations.items()
    }
    report = {
        "demonstrations": counts,
        "parameters": model.num_parameters(),
        "base_hash": policy.hash,
        **job.report(history),
        **steered,
    }
    write_json(context.reports / "sft.json", {**report, **steered})
    for name, value in job.ledger.metrics().items():
        context.metric(name, value)
    context.artifact(context.reports / "sft.json")
    context.artifact(context.reports / "sft" / "history.csv")


def prune(context: StageContext) -> None:
    """Remove what unlisted domains left in the inputs."""
    keep_only(context.root, context.params.domains, ["data/curated"])


def run(context: StageContext) -> None:
    from stages.agent.chat import Chat
    from stages.agent.policy import load_policy
    from stages.engine.architectures import check_served
    from stages.training.common.adapters import prepare_model, weight_precision
    from stages.training.common.loop import run_loop
    from stages.training.sft.job import SftJob

    section: Sft = context.params.sft
    context.log_params(section.model_dump())
    if section.demonstrations == 0:
        if context.main:
            keep_base(context)
        return

    demonstrations = read_demonstrations(context)
    demonstrations["train"] = draw(demonstrations["train"], section.demonstrations, context.params.seed)
    path = context.params.model.path
    policy = load_policy(path, precision=weight_precision(context.params), attention="sdpa", root=context.root)
    check_served(policy.folder, context.params.model.max_length)  # a hub model may have been downloaded just now
    prepare_model(policy.model, context.params, context.params.seed, "sft")
    chat = Chat(policy.tokenizer, context.params.model.thinking)
    job = SftJob(context.params, policy.model, chat, demonstrations, context.team, read_specs(context))

    checkpoints = Checkpoints(context, {"model": policy.hash})  # DVC does not track models outside data/base
    history = run_loop(context, checkpoints, job, job.steps, section.checkpoint_every)
    job.close()
    if not context.main:
        return
    write_outputs(context, policy, job, history, demonstrations)
    checkpoints.clear()


if __name__ == "__main__":
    raise SystemExit(stage_run("sft", run, params, open_tracker, launched=True, prune=prune))
