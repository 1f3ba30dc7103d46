"""In which language a text is, for preferences in which an answer in another one than the prompt's loses."""

from __future__ import annotations

from functools import lru_cache

SHORTEST = 3
"""Words below which a text's language is not told: names and numbers have none."""


@lru_cache(maxsize=65536)
def language_of(text: str) -> str | None:
    """ISO 639-1 code of the likeliest language; None for fewer than SHORTEST words. Deterministic. Needs py3langid; settings
    are refused without it."""
    from py3langid import classify

    if len(text.split()) < SHORTEST:
        return None
    return str(classify(text)[0])


def strays(prompt: str, answer: str) -> bool:
    """Whether an answer is in another language than its prompt, as far as both can be told."""
    asked, found = language_of(prompt), language_of(answer)
    return asked is not None and found is not None and asked != found
