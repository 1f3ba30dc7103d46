"""The response in what a policy wrote, for judges that must not read its thoughts (RLMT, arXiv 2509.20357).

E(o)  no marker: o. Marker found: the text after it, without white space before; not found: `missing` if strict, else o.
      Then with an end marker: found: the text before it, without white space after; not found: `missing` if strict.
"""

from __future__ import annotations

from typing import Literal

MISSING = "[NULL]"
"""What a strict judge reads of an answer without its markers."""


def response(
    text: str,
    marker: str,
    end: str = "",
    occurrence: Literal["first", "last"] = "first",
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
