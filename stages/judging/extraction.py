"""The response in what a policy wrote, for judges that must not read its thoughts (RLMT, arXiv 2509.20357).

E(o)  no marker: o. Marker found: the text after it, without white space before; not found: `missing` if strict, else o.
      Then with an end marker: found: the text before it, without white space after; not found: `missing` if strict.

By the markers of model.thinking E(o) is the action that the environment receives of the same turn (stages/records/thinking.py),
so that a thought that quotes a marker is read alike by both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stages.records.thinking import Occurrence, Thinking, parse_turn

if TYPE_CHECKING:
    from stages.judging.settings import Extraction

MISSING = "[NULL]"
"""What a strict judge reads of an answer without its markers."""


def response(
    text: str,
    marker: str,
    end: str = "",
    occurrence: Occurrence = "first",
    strict: bool = True,
    missing: str = MISSING,
) -> str:
    """E(o), see the module. `occurrence`: of the marker, where it is repeated."""
    if marker:
        if marker not in text:
            if strict:
                return missing
        else:
            text = text.partition(marker)[2] if occurrence == "first" else text.rpartition(marker)[2]
            text = text.lstrip()
    if end:
        if end in text:
            return text.partition(end)[0].rstrip()
        if strict:
            return missing
    return text


def spoken(text: str, thinking: Thinking, strict: bool = True, missing: str = MISSING) -> str:
    """E(o) by the markers of model.thinking. Lenient, a message without the end of a thought, or that ends within one, is o."""
    found = parse_turn(text, thinking)
    if found.marked or (not strict and found.finished and thinking.end in text):
        return found.action
    return missing if strict else text


def reader(extract: Extraction, thinking: Thinking | None, strict: bool | None = None) -> Callable[[str], str]:
    """E for messages, by section `judge.extract`; `strict`: in place of the section's."""
    strict = extract.strict if strict is None else strict
    if extract.marker is None and thinking is not None:

        def read(text: str) -> str:
            found = spoken(text, thinking, strict, extract.missing)
            if found == extract.missing:
                return found
            return response(found, "", extract.end, "first", strict, extract.missing)

        return read
    occurrence = extract.occurrence or ("first" if thinking is None else thinking.occurrence)
    return lambda text: response(text, extract.marker or "", extract.end, occurrence, strict, extract.missing)
