"""TRL's side of a comparison: its GRPOTrainer, driven step by step, at its fastest setting on this machine.

Same weights, tokenizer, cores and precision; AdamW (0.9, 0.999) without decay, gradients clipped at 1, temperature 1 on the
full support, no KL term. Logging, saving and evaluation are off, and gradient checkpointing where ours is. Attention kernel,
cache, micro-batch, and threads or processes are chosen by trial (`measure.fastest`).

Multi-turn episodes use TRL's tool loop (`environment_factory`). It needs a chat template that renders tool calls and a parser for
them; `tool_tokenizer` adds both to the shipped tokenizer so that the tokens equal those of the shipped template, with tool
responses in place of user messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.measure import Options
from benchmarks.models import load

TOOL = "act"
TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = 'user' if message['role'] == 'tool' else message['role'] %}"
    "{{ '<|' + role + '|>' }}"
    "{% if message['tool_calls'] %}{% for call in message['tool_calls'] %}"
    "{{ call['function']['name'] + ' ' + (call['function']['arguments'] | tojson) }}"
    "{% endfor %}{% else %}{{ message['content'] }}{% endif %}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def available() -> str:
    """Why TRL is unavailable; "" if it is available."""
    try:
        import trl  # noqa: F401
    except ImportError as error:
        return f"TRL is not installed ({error}); pip install -e .[bench]"
    return ""


def tool_tokenizer(tokenizer: Any, is_action: Callable[[str], bool]) -> Any:
    """`tokenizer` with tool calls: a message for which `is_action` holds is a tool call with its full text."""

    def parse_response(ids: Sequence[int], **_: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        if not is_action(text):
            return {"role": "assistant", "content": text}
        call = {"type": "function", "function": {"name": TOOL, "arguments": {"action": text}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    tokenizer.chat_template = TEMPLATE
    # TRL checks that it exists before it calls parse_response.
    tokenizer.response_template = {}
    tokenizer.parse_response = parse_response
    return tokenizer


def configuration(options: Options, **settings: Any) -> Any:
    """A GRPOConfig with the fixed settings of the comparison and `settings`."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(options.scratch / "trl"),
        use_cpu=options.device == "cpu",
        bf16=options.precision == "bfloat16",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        max_grad_norm=1.0,
        ddp_find_unused_parameters=False,  # none are unused, and looking for them takes time
        **settings,
    )


def make_trainer(
    options: Options,
    folder: Path,
    *,
    rows: int,
    group: int,
    prompts: Sequence[dict[str, Any]],
    completion: int,
    attention: str = "sdpa",
    cache: str | None = None,
    accumulate: int = 1,
    generation: dict[str, Any] | None = None,
    environment: Callable[[], Any] | None = None,
    reward: Callable[..., list[float]] | None = None,
    is_action: Callable[[str], bool] | None = None,
    tool_turns: int | None = None,
    learning_rate: float = 1e-6,
    weights: str = "float32",
    checkpointing: bool = False,
    adapters: Any = None,
    processes: int = 1,
) -> Any:
    """A GRPOTrainer ready for `rollout` and `update`.

    rows: episodes per iteration of all `processes`, in groups of `group`, trained in `accumulate` micro-batches; completion:
    maximum tokens after the prompt (and Dr. GRPO's divisor); prompts: dataset rows; generation: arguments of transformers'
    `generate`; weights: their precision; adapters: peft's configuration, for LoRA.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from trl import GRPOTrainer

    model, tokenizer = load(folder, attention, options.device, weights)
    tokenizer.padding_side = "left"
    if environment is not None:
        tokenizer = tool_tokenizer(tokenizer, is_action or (lambda text: True))
    config = configuration(
        options,
        per_device_train_batch_size=rows // accumulate // processes,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate,
        num_generations=group,
        max_completion_length=completion,
        max_tool_calling_iterations=tool_turns,
        cache_implementation=cache,
        generation_kwargs=generation,
        learning_rate=learning_rate,
        gradient_checkpointing=checkpointing,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward or (lambda completions, **_: [0.0] * len(completions)),
        args=config,
        train_dataset=Dataset.from_list([dict(prompt) for prompt in prompts]),
        environment_factory=environment,
        peft_config=adapters,
    )
    trainer.create_optimizer()
    # What `Trainer.train` does before its loop.
    if checkpointing:
        model = trainer.model
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # older releases
        enable(trainer.args.gradient_checkpointing_kwargs or None)
    trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
    trainer.current_gradient_accumulation_steps = accumulate
    trainer.model.train()
    return trainer


def rollout(trainer: Any, prompts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """TRL's rollout and scoring of dataset rows, one per episode; returns its training batch."""
    return trainer._generate_and_score_completions([dict(prompt) for prompt in prompts])


def action_tokens(batch: dict[str, Any]) -> int:
    """Number of tokens sampled from the policy."""
    return int((batch["completion_mask"] * batch["tool_mask"]).sum())


def losses(trainer: Any, batch: dict[str, Any]) -> float:
    """Forward and backward of all micro-batches; returns the loss."""
    from trl.trainer.utils import split_tensor_dict

    micro_batches = split_tensor_dict(batch, trainer.current_gradient_accumulation_steps)
    total = 0.0
    for number, micro in enumerate(micro_batches, start=1):
        # Processes exchange gradients once, after the last micro-batch, as in Trainer's loop.
        waits = trainer.accelerator.no_sync(trainer.model_wrapped) if number < len(micro_batches) else nullcontext()
        with waits:
            loss = trainer.compute_loss(trainer.model_wrapped, micro)
            trainer.accelerator.backward(loss)
        total += float(loss.detach())
    return total


def update(trainer: Any, batch: dict[str, Any]) -> float:
    """One optimiser step as in `Trainer`, without its bookkeeping."""
    trainer.optimizer.zero_grad(set_to_none=True)
    total = losses(trainer, batch)
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
    trainer.optimizer.step()
    trainer._step += trainer.current_gradient_accumulation_steps
    trainer._metrics["train"].clear()
    return total
