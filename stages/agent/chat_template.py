"""A tokenizer's chat template, rendered alike on every day and whatever a text holds.

Some templates put today's date into the prompt (`strftime_now`): the same task would be another prompt tomorrow, and a policy
would be trained on dates that it is never asked with. Such templates see one fixed day here, PROMPT_DATE, or the one that the
model's tokenizer_config.json names (`prompt_date: 2025-03-01`). Policies that are saved carry theirs in that file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

PROMPT_DATE = "2024-07-26"
"""The day on which it always is; Llama 3.1's template has the same where it is not told a date."""
DATE_KEY = "prompt_date"
"""Of tokenizer_config.json."""
_CLOCK = "strftime_now"
_CODES = "aAbBcCdDeFgGhHIjklmMpPrRSTuUVwWxXyY"
# transformers hands a template plain data alone, no functions: the formats' codes are given as texts, and a macro puts them in.
_MACRO = (
    "{% macro strftime_now(format) %}{% set found = namespace(text=format) %}{% for code, value in prompt_date_codes.items() %}"
    "{% set found.text = found.text | replace(code, value) %}{% endfor %}{{ found.text }}{% endmacro %}\n"
)


def prompt_date(tokenizer: Any) -> str | None:
    """The date that a tokenizer's template shows (YYYY-MM-DD); None if it shows none. Raises ValueError for a bad one in its
    tokenizer_config.json."""
    template = getattr(tokenizer, "chat_template", None)
    if _CLOCK not in str(template or ""):
        return None
    given = (getattr(tokenizer, "init_kwargs", None) or {}).get(DATE_KEY, PROMPT_DATE)
    try:
        return date.fromisoformat(given).isoformat()
    except (TypeError, ValueError) as error:
        name = getattr(tokenizer, "name_or_path", "")
        raise ValueError(
            f"{name}/tokenizer_config.json: {DATE_KEY} must be a date such as {PROMPT_DATE}, not {given!r}"
        ) from error


def _codes(day: str) -> dict[str, str]:
    """Each code of strftime with what it stands for at the day's first minute; those that this machine's C library lacks are left
    out."""
    moment = datetime.fromisoformat(day)
    codes = [f"%{flag}{letter}" for flag in ("", "-") for letter in _CODES]
    shown = {code: moment.strftime(code) for code in codes}
    return {code: text for code, text in shown.items() if text != code} | {"%%": "%"}


def renderer(tokenizer: Any) -> Callable[[Sequence[Mapping[str, str]]], str]:
    """Messages -> the template's text of them, ready for the assistant's turn."""
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    if (day := prompt_date(tokenizer)) is not None:
        options |= {"chat_template": _MACRO + tokenizer.get_chat_template(), "prompt_date_codes": _codes(day)}
    return lambda messages: tokenizer.apply_chat_template(list(messages), **options)


def format_marks(tokenizer: Any, opening: str, surroundings: Sequence[str]) -> list[str]:
    """What a text must not hold if it is not to pose as part of the format, the longest first.

    Special tokens, among them those that were added and have no role of their own (Llama 3's <|start_header_id|>); added tokens
    of any kind in what the template puts before (`opening`) and between messages (`surroundings`); and plain text between
    messages that is more than a word, such as "### Response:" or "[/INST]".
    """
    added = {token.content: bool(token.special) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    special = {*tokenizer.all_special_tokens, *(text for text, is_special in added.items() if is_special)}
    framed = "".join((opening, *surroundings))
    tokens = special | {text for text in added if text.strip() and text in framed}
    cut = alternatives(sorted({*added, *tokens}, key=len, reverse=True))
    lines = (line.strip() for text in surroundings for part in cut.split(text) for line in part.splitlines())
    plain = {line for line in lines if len(line) > 1 and not line.replace(" ", "").isalnum()}
    return sorted(tokens | plain, key=lambda mark: (-len(mark), mark))


def alternatives(texts: Sequence[str]) -> re.Pattern[str]:
    """A pattern that finds any of `texts`, the first that fits; nothing for none."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
