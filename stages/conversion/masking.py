"""Personal data in the log: found by patterns, replaced by typed placeholders, and restored only with the key.

A placeholder is a keyed hash of the trace and the value, so that a value has one placeholder within a trace and others elsewhere.
The values themselves are in a vault, encrypted with the same key. Names are masked from a list: recognising them takes a language
model of hundreds of megabytes (presidio with spaCy), which is larger than the models that a conversion makes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.runtime.files import atomic_file, atomic_text, locked

if TYPE_CHECKING:
    from stages.conversion.settings import Conversion

DIGITS = 12
PLACEHOLDER = re.compile(r"<(EMAIL|PHONE|CARD|IP|NAME)_[0-9a-f]{12}>")
_LETTER = r"\w\u0300-\u036f"
"""With combining accents, which decomposed text has after its letters."""
_LOCAL, _HOST = rf"[{_LETTER}.%+-]", rf"@[{_LETTER}-]+(?:\.[{_LETTER}-]+)+"
_EMAIL = re.compile(rf"(?<!{_LOCAL}){_LOCAL}+{_HOST}(?:{_LOCAL}*{_HOST})*")
"""Matches begin where words do, or time would grow with the square of a word's length; hence addresses that touch are one."""
_CARD = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])")
_PHONES = (
    re.compile(r"(?<![\w.-])\+\d{1,3}(?:[ -]?\(?\d{1,8}\)?){1,5}(?![\w-])"),
    re.compile(r"(?<![\w.-])\(?0\d{1,5}\)?[ /-]\d{2,8}(?:[ -]\d{2,6})*(?![\w-])"),
    re.compile(r"(?<![\w.-])\(?\d{3}\)?[ -]\d{3}-\d{4}(?![\w-])"),
)
"""International, national with a leading zero, and North American numbers."""
_IPV4 = r"(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)"
_IPV6 = rf"(?:[0-9A-Fa-f]{{0,4}}:){{2,7}}(?:{_IPV4}|[0-9A-Fa-f]{{1,4}}|(?<=::))(?!\w|\.\d|:[:0-9A-Fa-f])"
_IP = re.compile(rf"(?<![\w.]){_IPV4}|(?<![\w:]){_IPV6}")
"""Punctuation may follow an address; another number makes it a part of something longer, such as a version."""


class LeakError(ValueError):
    """A row still has personal data after masking."""


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return text != "::"


def _is_phone(text: str) -> bool:
    return 8 <= sum(letter.isdigit() for letter in text) <= 15


_FINDERS: Mapping[str, Sequence[tuple[re.Pattern[str], Callable[[str], bool]]]] = {
    "email": [(_EMAIL, bool)],
    "card": [(_CARD, bool)],
    "ip": [(_IP, _is_ip)],
    "phone": [(pattern, _is_phone) for pattern in _PHONES],
}
"""In the order in which they are applied; numbers of 13 to 19 digits count as cards whatever their check digit."""


def load_key(path: Path) -> bytes:
    """The key in a file, 32 bytes; it is made if it does not exist, readable by its owner alone."""
    import secrets

    if not path.exists():
        with locked(path.with_name(f"{path.name}.lock"), wait=True):  # of several servers that start, the first makes it
            if not path.exists():
                with atomic_file(path) as partial:
                    partial.touch(mode=0o600)
                    partial.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
    key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    if len(key) != 32:
        raise ValueError(f"{path} is not a key of 64 hex digits; delete it to make a new one (older placeholders stay masked)")
    return key


@dataclass
class Masker:
    """Masks the texts of calls. `vault`: placeholder -> encrypted value."""

    key: bytes
    kinds: Sequence[str]
    names: Sequence[str] = ()
    vault: dict[str, str] = field(default_factory=dict)

    def _fernet(self) -> Any:
        from cryptography.fernet import Fernet

        return Fernet(base64.urlsafe_b64encode(hashlib.sha256(b"vault" + self.key).digest()))

    def placeholder(self, kind: str, value: str, trace: str) -> str:
        """The value's placeholder within a trace; its vault entry is made."""
        digest = hmac.new(self.key, f"{kind}\0{trace}\0{value}".encode(), hashlib.sha256).hexdigest()[:DIGITS]
        name = f"<{kind.upper()}_{digest}>"
        if name not in self.vault:
            self.vault[name] = self._fernet().encrypt(value.encode()).decode()
        return name

    def _replaced(self, text: str, replace: Callable[[str, str], str]) -> str:
        pieces, at = [], 0
        for kept in PLACEHOLDER.finditer(text):
            pieces += [self._plain(text[at : kept.start()], replace), kept.group()]
            at = kept.end()
        return "".join([*pieces, self._plain(text[at:], replace)])

    def _plain(self, text: str, replace: Callable[[str, str], str]) -> str:
        if "name" in self.kinds and self.names:
            listed = "|".join(re.escape(name) for name in sorted(self.names, key=lambda name: (-len(name), name)))
            text = re.sub(rf"(?<!\w)(?:{listed})(?!\w)", lambda found: replace("name", found.group()), text)
        for kind, finders in _FINDERS.items():
            if kind not in self.kinds:
                continue
            for pattern, valid in finders:
                parts = re.split(f"({PLACEHOLDER.pattern.replace('(', '(?:', 1)})", text)
                text = "".join(
                    part
                    if place % 2
                    else pattern.sub(lambda found: replace(kind, found.group()) if valid(found.group()) else found.group(), part)  # noqa: B023
                    for place, part in enumerate(parts)
                )
        return text

    def mask(self, text: str, trace: str) -> str:
        """`text` with personal data replaced."""
        return self._replaced(text, lambda kind, value: self.placeholder(kind, value, trace))

    def found(self, text: str) -> list[tuple[str, str]]:
        """(kind, value) of personal data in a text."""
        seen: list[tuple[str, str]] = []

        def note(kind: str, value: str) -> str:
            seen.append((kind, value))
            return f"<{kind.upper()}_{'0' * DIGITS}>"

        self._replaced(text, note)
        return seen

    def unmask(self, text: str) -> str:
        """`text` with the values of its placeholders. Raises ValueError without the right key."""
        from cryptography.fernet import InvalidToken

        def value(found: re.Match[str]) -> str:
            if found.group() not in self.vault:
                return found.group()
            try:
                return str(self._fernet().decrypt(self.vault[found.group()].encode()).decode())
            except InvalidToken as error:
                raise ValueError("the vault was written with another key") from error

        return PLACEHOLDER.sub(value, text)

    def mask_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call with its trace's name and its texts masked."""
        trace = str(call["trace"])
        prompt = [{**message, "content": self.mask(message["content"], trace)} for message in call["prompt"]]
        return {**call, "trace": self.trace(trace), "prompt": prompt, "response": self.mask(call["response"], trace)}

    def trace(self, trace: str) -> str:
        """A trace's name, which the client chose, masked; different names stay different."""
        return self.mask(trace, trace)

    def check(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Raise LeakError, without quoting it, for a call with unmasked personal data."""
        for number, call in enumerate(calls, 1):
            trace = str(call["trace"])
            for text in (trace, *(message["content"] for message in call["prompt"]), call["response"]):
                if found := self.found(text):
                    kinds = ", ".join(sorted({kind for kind, _ in found}))
                    where = "in its trace's name" if self.found(trace) else f"trace {trace}"
                    raise LeakError(f"call {number} ({where}) has unmasked personal data: {kinds}; nothing was written")

    def save(self, path: Path) -> None:
        atomic_text(path, json.dumps(self.vault, sort_keys=True, indent=1) + "\n")


def masker_of(settings: Conversion, root: Path) -> Masker:
    """The masker of a conversion, with an empty vault; its key is made if it does not exist."""
    return Masker(load_key(root / settings.key), settings.curate.pii, settings.curate.names)
