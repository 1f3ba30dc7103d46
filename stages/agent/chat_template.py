"""Renders a tokenizer's chat template with a fixed date, and finds the marks of its format.

Some templates put today's date into the prompt (`strftime_now`), so a task's prompt would change from day to day. Here such
templates see a fixed date: PROMPT_DATE, or `prompt_date` of the model's tokenizer_config.json (`prompt_date: 2025-03-01`), where
saved policies record theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

PROMPT_DATE = "2024-07-26"
"""The default, as in Llama 3.1's template."""
DATE_KEY = "prompt_date"
"""Key in tokenizer_config.json."""
_CLOCK = "strftime_now"
_CODES = "aAbBcCdDeFgGhHIjklmMpPrRSTuUVwWxXyY"
# transformers passes only plain data to templates, so a macro replaces the format codes by precomputed texts.
_MACRO = (
    "{% macro strftime_now(format) %}{% set found = namespace(text=format) %}{% for code, value in prompt_date_codes.items() %}"
    "{% set found.text = found.text | replace(code, value) %}{% endfor %}{{ found.text }}{% endmacro %}\n"
)


def prompt_date(tokenizer: Any) -> str | None:
    """The date (YYYY-MM-DD) shown by a tokenizer's template, or None. Raises ValueError for an invalid one in its
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
    """strftime's codes with their text at midnight of `day`; codes unsupported by the C library are omitted."""
    moment = datetime.fromisoformat(day)
    codes = [f"%{flag}{letter}" for flag in ("", "-") for letter in _CODES]
    shown = {code: moment.strftime(code) for code in codes}
    return {code: text for code, text in shown.items() if text != code} | {"%%": "%"}


def renderer(tokenizer: Any) -> Callable[[Sequence[Mapping[str, str]]], str]:
    """A function that renders messages with the template, up to the assistant's next turn."""
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    if (day := prompt_date(tokenizer)) is not None:
        options |= {"chat_template": _MACRO + tokenizer.get_chat_template(), "prompt_date_codes": _codes(day)}
    return lambda messages: tokenizer.apply_chat_template(list(messages), **options)


def format_marks(tokenizer: Any, opening: str, surroundings: Sequence[str]) -> list[str]:
    """Texts by which an observation could imitate the chat format, longest first.

    Special tokens, including added ones without a role (Llama 3's <|start_header_id|>); added tokens of any kind that the
    template puts before (`opening`) or between messages (`surroundings`); and plain text between messages that is more than a
    word, such as "### Response:" or "[/INST]".
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
    """A pattern that matches any of `texts`, earlier ones first; no match for an empty list."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
