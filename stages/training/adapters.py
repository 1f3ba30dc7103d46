"""LoRA while training: frozen weights with low-rank factors beside them, put into the Hugging Face model in place through peft.

The model object stays what it was for everything around it (engine, log-probabilities, critic); only its linear layers are
wrapped. Without dropout, which would part sampling from training log-probabilities. Reading adapters is in
stages/engine/adapters.py and needs no peft.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stages.agent.policy import write_folder
from stages.agent.settings import Lora
from stages.engine.adapters import CONFIG, PREFIX, WEIGHTS, AdapterError, low_rank
from stages.seeding import seed_torch
from stages.training.recompute import recompute_layers

if TYPE_CHECKING:
    from stages.params import Params

_NAME = "default"


def weight_precision(params: Params) -> str:
    """Precision to load a model's weights in for training: float32, as the optimiser's master copy must be. Weights that LoRA
    leaves alone need no master copy: in bfloat16 runs they take half the memory, and only the factors are float32."""
    return params.resources.precision if params.model.lora.rank else "float32"


def prepare_model(model: Any, params: Params, *key: object) -> None:
    """Do to a loaded model what `model.lora` and `model.gradient_checkpointing` ask for; random factors are drawn by `key`, which
    begins with the stage's seed."""
    if params.model.lora.rank:
        add_adapters(model, params.model.lora, *key)
    if params.model.gradient_checkpointing:
        recompute_layers(model)


def add_adapters(model: Any, lora: Lora, *key: object) -> None:
    """Freeze the model's weights and put trainable float32 factors A [rank, in], B [out, rank] beside those that `lora` targets.

    A is random by `key`, B is 0, so that the model still computes what it did. Raises AdapterError for targets that the model
    does not have, or that are not linear layers of its backbone.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets: Any = lora.targets
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, bias="none")
    seed_torch(*key, "lora")
    output_layer = model.get_output_embeddings()
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise AdapterError(f"model.lora.targets {lora.targets} do not fit {type(model).__name__}: {error}") from error
    for name, module in adapted(model):
        if type(module.base_layer) is not nn.Linear or module.base_layer is output_layer:
            raise AdapterError(f"model.lora.targets: {name} is no linear layer below the output layer; leave it out")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()


def adapted(model: Any) -> list[tuple[str, Any]]:
    """(name, peft's layer) of every layer with an adapter; none for a model without adapters."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def deltas(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, change [out, in] float32) of every weight with an adapter, named as in the model without adapters."""
    for name, layer in adapted(model):
        a, b = layer.lora_A[_NAME].weight.detach(), layer.lora_B[_NAME].weight.detach()
        yield f"{name}.weight", low_rank(a, b, layer.scaling[_NAME])


def twin(module: Any) -> Any:
    """A copy of the module that shares the weights which are not trained, and has its own of the others."""
    frozen = {id(parameter): parameter for parameter in module.parameters() if not parameter.requires_grad}
    return copy.deepcopy(module, frozen)


def reference_of(policy: Any) -> Any:
    """The frozen model that `policy` is before it is trained: a copy, or, under LoRA, its own weights without the adapters."""
    reference = twin(policy)
    for name, layer in adapted(reference):
        reference.set_submodule(name, layer.base_layer)
    if hasattr(reference, "peft_config"):
        del reference.peft_config
    return reference.requires_grad_(False)


def save_adapters(model: Any, tokenizer: Any, folder: Path, base: str) -> None:
    """Write the adapters as a folder in peft's format whose bytes depend on factors, tokenizer and `base` alone.

    base: the base model's folder relative to `folder` or to one above it (see stages/engine/adapters.py).
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, layer in adapted(model):
        for part, factors in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            tensors[f"{PREFIX}{name}.{part}.weight"] = factors[_NAME].weight.detach().cpu().contiguous()
    config = model.peft_config[_NAME].to_dict()
    config |= {"base_model_name_or_path": base, "inference_mode": True, "task_type": "CAUSAL_LM", "peft_type": "LORA"}
    # peft keeps names in sets, whose order differs from run to run.
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}

    def write(partial: Path) -> None:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    write_folder(folder, tokenizer, write)


def trained_names(module: nn.Module) -> set[str]:
    """Names in the module's state of what training changes: all but the parameters that are frozen."""
    frozen = {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    return set(module.state_dict()) - frozen


def trained_state(module: nn.Module) -> dict[str, Any]:
    """The module's state without frozen parameters, which a checkpoint has no need of: they come from the stage's inputs."""
    names = trained_names(module)
    return {name: value for name, value in module.state_dict().items() if name in names}


@torch.no_grad()
def load_trained_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Put back what `trained_state` returned. Raises ValueError if the module trains other parameters."""
    differing = trained_names(module) ^ set(state)
    if differing:
        raise ValueError(f"the checkpoint and the model do not train the same parameters; {sorted(differing)[0]} is in one only")
    module.load_state_dict(state, strict=False)
