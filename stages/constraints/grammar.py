"""Turns that match a regular expression, a JSON schema or a context-free grammar, by llguidance (the extra `constraints`)."""

from __future__ import annotations

import json
import re
from typing import Any

from stages.constraints.formula import SpecError
from stages.constraints.monitor import Position
from stages.constraints.transcript import Reading

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON; without this, a turn could consist of it."""
EXTRA = "pip install 'bellwether[constraints]'"


def _source(kind: str, spec: str, text: str) -> str:
    """The grammar as llguidance reads it. Turns may begin with a blank, as many tokenizers begin texts. Raises SpecError for a
    text that can't be parsed."""
    main: dict[str, Any]
    if kind == "regex":
        # Lark writes an expression between slashes, so that its own need a backslash, unless they have one.
        within = re.sub(r"\\.|/", lambda found: r"\/" if found.group() == "/" else found.group(), text, flags=re.DOTALL)
        main = {"lark_grammar": f"start: /{within}/"}
    elif kind == "grammar":
        main = {"lark_grammar": text}
    else:
        try:
            main = {"json_schema": {**json.loads(text), "x-guidance": LAYOUT}}
        except (TypeError, ValueError) as error:
            raise SpecError(f"constraint.spec: {spec} is not a JSON schema: {error}") from error
    return json.dumps({"grammars": [{"lark_grammar": 'start: " "? @main'}, {"name": "main", **main}]})


class GrammarRules:
    """The rules of `kind` regex, json_schema or grammar. Each turn stands alone: positions are always (). text: the
    specification's. Raises SpecError for a grammar that llguidance does not accept."""

    start: Position = ()

    def __init__(self, kind: str, spec: str, text: str) -> None:
        self.kind, self.spec, self.text = kind, spec, text
        self.source = _source(kind, spec, self.text)
        self._bytes: Any = None
        if problem := self.matcher().get_error():
            raise SpecError(f"constraint.spec: {kind} {spec!r} is not valid: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return GrammarRules, (self.kind, self.spec, self.text)

    def matcher(self, tokenizer: Any = None) -> Any:
        """A fresh `llguidance.LLMatcher`; tokenizer: an `LLTokenizer`, by default of bytes."""
        import llguidance

        if tokenizer is None:
            self._bytes = self._bytes or llguidance.LLTokenizer("byte")
            tokenizer = self._bytes
        return llguidance.LLMatcher(tokenizer, self.source, log_level=0)

    def next_turn(self, position: Position | None) -> Position | None:
        """See `Transcripts.next_turn`."""
        return position

    def read(self, position: Position | None, text: str) -> Reading:
        """Whether a turn's text matches; after a violation, later turns are judged all the same."""
        matcher, data = self.matcher(), list(text.strip().encode())
        taken = matcher.try_consume_tokens(data)
        if taken == len(data) and matcher.is_accepting():
            return Reading((), ())
        matched = bytes(data[:taken]).decode(errors="ignore")
        return Reading((), (), f"the turn matches {self.kind} only up to {matched[-20:]!r}", len(matched))

    def commands(self, text: str) -> list[str]:
        return [text]

    def write(self, position: Position | None, action: str) -> str | None:
        return None if self.read((), action).violation else action
