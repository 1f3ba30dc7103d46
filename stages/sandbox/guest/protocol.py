"""The protocol between host, program and tests: messages, encoding of plain values, descriptions of errors."""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

MAX_FRAME = 4_000_000
"""Most bytes in one message."""
MAX_ITEMS = 100_000
"""Most items taken from an iterator."""
MAX_MESSAGE = 300
"""Most characters of an error's text or of a displayed value."""
MOST_BITS = 2000
"""Of an integer that is sent in decimal: Python converts no more than 4300 digits."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SIZE = struct.Struct("!I")


def send(channel: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    if len(data) > MAX_FRAME:
        raise ValueError("too much to send")
    channel.sendall(_SIZE.pack(len(data)) + data)


def receive(channel: socket.socket) -> Any:
    """The next message. Raises EOFError at the end, ValueError for a malformed one."""
    (size,) = _SIZE.unpack(_exactly(channel, _SIZE.size))
    if size > MAX_FRAME:
        raise ValueError("message too long")
    return json.loads(_exactly(channel, size))


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            part = channel.recv(size - len(data))
        except OSError:
            part = b""
        if not part:
            raise EOFError
        data += part
    return data


def encode(value: Any) -> Any:
    """Plain values and containers of them as JSON; an iterator as its items. Raises TypeError for anything else."""
    if type(value) is int and value.bit_length() > MOST_BITS:
        return ["int", hex(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, Mapping):
        return ["dict", *([encode(key), encode(item)] for key, item in value.items())]
    for kind, name in ((list, "list"), (tuple, "tuple"), (frozenset, "frozenset"), (Set, "set"), (range, "range")):
        if isinstance(value, kind):
            return [name, *map(encode, value)]
    if isinstance(value, Iterator):
        items = [item for item, _ in zip(value, range(MAX_ITEMS), strict=False)]
        return ["iterator", *map(encode, items)]
    raise TypeError(f"{type(value).__name__} is no plain value")


def decode(data: Any) -> Any:
    """The inverse of `encode`. Raises ValueError, TypeError or IndexError for data that `encode` did not produce."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("no value")
        return data
    name, *items = data
    if name == "int":
        return int(*items, 16)
    if name == "complex":
        return complex(*items)
    if name == "bytes":
        return bytes.fromhex(*items)
    if name == "dict":
        return {decode(key): decode(item) for key, item in items}
    values = [decode(item) for item in items]
    if name == "range":
        step = values[1] - values[0] if len(values) > 1 else 1
        return range(values[0], values[0] + step * len(values), step) if values else range(0)
    kinds: dict[str, Callable[[list], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}
    if name not in kinds:
        raise ValueError("no value")
    return kinds[name](values)


def shown(value: Any) -> str:
    try:
        return clip(repr(value))
    except ValueError:  # an integer of more digits than Python converts
        return f"a {type(value).__name__} with too many digits to show"


def clip(text: str) -> str:
    """`text` on one line, shortened, without memory addresses, which differ between runs, and with halves of surrogate pairs
    written out, which are no text to a tokenizer."""
    text = _ADDRESS.sub("", " ".join(text.split())).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def describe(error: BaseException) -> str:
    """An error as in "ZeroDivisionError: division by zero"; just the type if getting its text fails."""
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except BaseException:
        text = ""
    return clip(f"{type(error).__name__}: {text}" if text else type(error).__name__)
