"""LoRA training: peft adds low-rank factors to the frozen linear layers of the Hugging Face model, in place.

The model object stays the same for engine, log-probabilities and critic. There is no dropout: with it, sampling and training
log-probabilities differ. stages/engine/adapters.py reads adapters and needs no peft.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stages.agent.policy import load_policy, write_folder
from stages.agent.recompute import recompute_layers
from stages.agent.settings import Lora
from stages.engine.adapters import CONFIG, PREFIX, WEIGHTS, AdapterError, fold, low_rank
from stages.engine.products import is_linear
from stages.seeding import seed_torch

if TYPE_CHECKING:
    from stages.runtime.run_params import RunParams

_NAME = "default"


def weight_precision(params: RunParams) -> str:
    """Precision in which to load a model for training: float32, which the optimiser needs, or, under LoRA, that of the run, since
    frozen weights need no float32 master copy."""
    return params.resources.precision if params.model.lora.rank else "float32"


def prepare_model(model: Any, params: RunParams, *key: object) -> None:
    """Apply `model.lora` and `model.gradient_checkpointing` to a loaded model; `key`, which begins with the stage's seed, seeds
    the random factors."""
    if params.model.lora.rank:
        add_adapters(model, params.model.lora, *key)
    if params.model.gradient_checkpointing:
        recompute_layers(model)


def add_adapters(model: Any, lora: Lora, *key: object) -> None:
    """Freeze the model's weights and add trainable float32 factors A [rank, in], B [out, rank] to the layers that `lora` targets.

    A is random, seeded by `key`; B is 0, so the model's function is unchanged. Raises AdapterError for targets that do not exist
    or are not linear layers of the backbone.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets: Any = lora.targets
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, bias="none")
    seed_torch(*key, "lora")
    output_layer = model.get_output_embeddings()
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise AdapterError(f"model.lora.targets: {lora.targets} not found in {type(model).__name__}: {error}") from error
    for name, module in adapted(model):
        if not is_linear(module.base_layer) or module.base_layer is output_layer:
            raise AdapterError(f"model.lora.targets: {name} is not a linear layer of the backbone; remove it")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()


def adapted(model: Any) -> list[tuple[str, Any]]:
    """(name, peft layer) of every layer with an adapter."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def deltas(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name in the model without adapters, change [out, in] float32) of every weight with an adapter."""
    for name, layer in adapted(model):
        a, b = layer.lora_A[_NAME].weight.detach(), layer.lora_B[_NAME].weight.detach()
        yield f"{name}.weight", low_rank(a, b, layer.scaling[_NAME])


def whole_model(model: Any, folder: Path | str, lora: bool, root: Path | None = None) -> Any:
    """The trained `model` with all its weights. Adapters (`lora`) are merged into the weights as stored in `folder` (see
    `load_policy`): those in training may be rounded to bfloat16."""
    if not lora:
        return model
    whole = load_policy(folder, root=root).model
    fold(whole, deltas(model))
    return whole


def twin(module: Any) -> Any:
    """A copy of the module that shares its frozen weights and has its own trained ones."""
    frozen = {id(parameter): parameter for parameter in module.parameters() if not parameter.requires_grad}
    return copy.deepcopy(module, frozen)


def reference_of(policy: Any) -> Any:
    """The frozen reference model of `policy` as it is: a copy that, under LoRA, shares the frozen weights. Adapters that have no
    effect yet (B is 0) are left out."""
    reference = twin(policy)
    layers = adapted(reference)
    if not any(bool(layer.lora_B[_NAME].weight.any()) for _, layer in layers):
        for name, layer in layers:
            reference.set_submodule(name, layer.base_layer)
        if hasattr(reference, "peft_config"):
            del reference.peft_config
    return reference.requires_grad_(False)


def save_adapters(model: Any, tokenizer: Any, folder: Path, base: str) -> None:
    """Write the adapters in peft's format, deterministically.

    base: the base model's folder, relative to `folder` or one of its parents (see stages/engine/adapters.py).
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, layer in adapted(model):
        for part, factors in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            tensors[f"{PREFIX}{name}.{part}.weight"] = factors[_NAME].weight.detach().cpu().contiguous()
    config = model.peft_config[_NAME].to_dict()
    config |= {"base_model_name_or_path": base, "inference_mode": True, "task_type": "CAUSAL_LM", "peft_type": "LORA"}
    # peft has sets of names, whose order differs from run to run.
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}

    def write(partial: Path) -> None:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    write_folder(folder, tokenizer, write)


def trained_names(module: nn.Module) -> set[str]:
    """Names of the module's state that training changes: all but frozen parameters."""
    frozen = {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    return set(module.state_dict()) - frozen


def trained_state(module: nn.Module) -> dict[str, Any]:
    """The module's state without frozen parameters, which come from the stage's inputs."""
    names = trained_names(module)
    return {name: value for name, value in module.state_dict().items() if name in names}


@torch.no_grad()
def load_trained_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Restore what `trained_state` returned. Raises ValueError if the module trains other parameters."""
    differing = trained_names(module) ^ set(state)
    if differing:
        raise ValueError(f"the checkpoint and the model have different trained parameters: only one has {sorted(differing)[0]}")
    module.load_state_dict(state, strict=False)
