"""Conversations as plain text, for base models: the tokens of their chat template may never have been trained."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

END = "\n\n"
"""Ends every message."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ 'User' if message['role'] == 'user' else 'Assistant' }}:\n"
    "{{ message['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant:\n{% endif %}"
)


def plain_text(tokenizer: Any) -> Any:
    """A copy of the tokenizer whose chat template needs no special token: roles as words, and END, its eos, after each message.
    Raises ValueError if END is not one token."""
    alone, between = (tokenizer.encode(text, add_special_tokens=False) for text in (END, f"yes{END}User:\n"))
    if len(alone) != 1 or alone[0] not in between:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ValueError(
            f"evaluate.examples_as: text ends messages with an empty line, which is not one token of tokenizer {name}; set it to "
            f"chat"
        )
    made = deepcopy(tokenizer)
    made.eos_token, made.chat_template = tokenizer.convert_ids_to_tokens(alone[0]), TEMPLATE
    return made
