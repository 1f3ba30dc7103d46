"""Trains the shipped base model (`data/base`): a small Llama, on procedural text in the environments' formats.

The stage is frozen. To train the model again: `python -m stages.pretraining`, then `dvc commit -f data/base/dvc.yaml:pretrain`.
Its settings are in data/base/params.yaml.
"""

from __future__ import annotations

from stages import params
from stages.runtime.files import atomic_files
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import open_tracker


def run(context: StageContext) -> None:
    from stages.agent.chat import Chat
    from stages.pretraining.job import PretrainJob, answer_accuracy, encode
    from stages.pretraining.settings import load_settings
    from stages.pretraining.text import held_out, make_corpus, tokenizer_texts, word_list
    from stages.pretraining.tokenizer import train_tokenizer
    from stages.records.episode import write_json
    from stages.records.sections import params_hash
    from stages.runtime.checkpoints import Checkpoints
    from stages.training.common.loop import make_processes, run_loop, write_history

    folder = context.data / "base"
    settings = load_settings(folder / "params.yaml")

    resources = context.params.resources
    processes = make_processes(resources, context.team)
    own = [make_corpus(settings, context.root / ".bellwether" / "pretrain", resources.workers)] if context.main else []
    (chats,) = processes.gather(own)
    tokenizer = train_tokenizer(tokenizer_texts(chats), settings.vocabulary, settings.max_length)
    chat = Chat(tokenizer)
    samples = [
        encode(chat, item, settings.max_length, settings.phases[settings.phase_number(index // settings.batch)].context_weight)
        for index, item in enumerate(chats)
    ]

    job = PretrainJob(samples, settings, len(tokenizer), processes)
    checkpoints = Checkpoints(context, {"settings": params_hash(settings)})
    history = run_loop(context, checkpoints, job, settings.steps, settings.checkpoint_every)
    model = job.close()
    if not context.main:
        return

    accuracy = answer_accuracy(model, [encode(chat, item, settings.max_length) for item in held_out(settings)])
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with atomic_files(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    write_history(folder / "history.csv", history)
    families = sorted({item.family for item in chats})
    write_json(
        folder / "corpus.json",
        {
            "samples": {family: sum(item.family == family for item in chats) for family in families},
            "tokens": sum(len(sample.token_ids) for sample in samples),
            "answer_accuracy": accuracy,
            "parameters": model.num_parameters(),
            "words": word_list(chats),
        },
    )
    checkpoints.clear()


if __name__ == "__main__":
    raise SystemExit(stage_run("pretrain", run, params, open_tracker, launched=True))
