"""Personal data in the log: which texts the patterns find, and that the server masks as the conversion's settings say."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from threading import Thread

import pytest

from stages.conversion.__main__ import main as convert
from stages.conversion.call_log import CallLog
from stages.conversion.masking import Masker, load_key
from stages.runtime.validation import ParamsError
from stages.serving.__main__ import call_log

KEY = bytes(range(32))
MASKER = Masker(KEY, ("email", "phone", "card", "ip"))
PROMPT = [{"role": "user", "content": "Ada Lovelace, a@b.com, 4111 1111 1111 1111"}]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("my address is 192.168.0.17.", ["192.168.0.17"]),
        ("192.168.0.17... or 10.0.0.1, 10.0.0.2:8080", ["192.168.0.17", "10.0.0.1", "10.0.0.2"]),
        ("no space after 10.0.0.1.Next", ["10.0.0.1"]),
        ("fe80::1 is up", ["fe80::1"]),
        ("from fe80::1: at 2001:db8::7. Or ::1", ["fe80::1", "2001:db8::7", "::1"]),
        ("1:2:3:4:5:6:7:8 and fe80::/10", ["1:2:3:4:5:6:7:8", "fe80::"]),
        ("::ffff:192.0.2.1 and 64:ff9b::192.0.2.33.", ["::ffff:192.0.2.1", "64:ff9b::192.0.2.33"]),
        ("1:2:3:4:5:6:192.0.2.1", ["1:2:3:4:5:6:192.0.2.1"]),
        ("mail a@bücher.de now", ["a@bücher.de"]),
        ("jürgen@firma.de.", ["jürgen@firma.de"]),
        ("ju\u0308rgen@bu\u0308cher.de", ["ju\u0308rgen@bu\u0308cher.de"]),
        ("иван@почта.рф, a.b+c@d-e.co.uk", ["иван@почта.рф", "a.b+c@d-e.co.uk"]),
        ("a@b.de+x@y.org", ["a@b.de+x@y.org"]),
    ],
)
def test_addresses_are_found_whole(text: str, values: list[str]):
    """Contract: whatever stands around an address, it is masked from its first to its last character."""
    assert [value for _, value in MASKER.found(text)] == values
    masked = MASKER.mask(text, "t")
    assert MASKER.found(masked) == []
    assert MASKER.unmask(masked) == text
    for value in values:
        text = text.replace(value, MASKER.placeholder("email" if "@" in value else "ip", value, "t"), 1)
    assert masked == text


@pytest.mark.parametrize(
    "text",
    [
        "1.2.3.4.5",
        "v192.168.0.17",
        "1.2.3.4.5.",
        "300.1.2.3",
        "12:30:45",
        "1:2:3:4:5:6:7:8:9",
        "a::b::other",
        "a @ b.de",
    ],
)
def test_what_only_resembles_an_address_is_left(text: str):
    assert MASKER.mask(text, "t") == text


def test_long_words_are_searched_in_linear_time():
    """Contract: a request of a few MiB without spaces, such as an encoded image, does not stop the server for hours."""
    for part in ("a", "ü", "1.", "1:", ":", "a@", "a@a"):
        assert MASKER.found(part * (2**20 // len(part))) == []


def test_server_masks_as_the_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Contract: a log of `--conversion SETTINGS` has the kinds and names of these settings masked, and their key restores it."""
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "conversion.yaml"
    settings.write_text("log: my/calls.jsonl\nkey: secrets/my.key\ncurate: {pii: [card, name], names: [Ada Lovelace]}\n")
    log = call_log(None, settings, tmp_path)
    assert log is not None
    log.call("t", PROMPT, "ok", 1.0)
    written = (tmp_path / "my/calls.jsonl").read_text()
    assert ("Ada" in written, "a@b.com" in written, "4111" in written) == (False, True, False)
    assert convert(["conversion.yaml", "--unmask"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == PROMPT
    elsewhere = call_log(tmp_path / "other.jsonl", settings, tmp_path)
    assert elsewhere is not None
    assert elsewhere.path == tmp_path / "other.jsonl"
    assert elsewhere.masker == Masker(load_key(tmp_path / "secrets/my.key"), ["card", "name"], ["Ada Lovelace"])
    assert not (tmp_path / ".bellwether").exists(), "the default key is not made"
    with pytest.raises(ParamsError, match=r"none\.yaml does not exist"):
        call_log(None, tmp_path / "none.yaml", tmp_path)


def test_without_settings_the_defaults_mask(tmp_path: Path):
    assert call_log(None, None, tmp_path) is None
    log = call_log(tmp_path / "calls.jsonl", None, tmp_path)
    assert log is not None
    log.call("t", PROMPT, "ok", 1.0)
    written = (tmp_path / "calls.jsonl").read_text()
    assert ("a@b.com" in written, "4111" in written) == (False, False)
    assert (tmp_path / ".bellwether/conversion.key").exists()


def test_log_of_another_key_is_not_continued(tmp_path: Path):
    """Contract: all values of a vault are restored with one key."""
    CallLog(tmp_path / "calls.jsonl", Masker(KEY, ("email",))).call("t", PROMPT, "ok", 1.0)
    with pytest.raises(ValueError, match=r"calls\.vault\.json: the vault was written with another key; mask with that key"):
        CallLog(tmp_path / "calls.jsonl", Masker(bytes(32), ("email",)))


def test_servers_that_start_together_have_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Contract: the key in the file is the one that each of them masks with."""
    keys: list[bytes] = []
    made = iter("ab")
    other = Thread(target=lambda: keys.append(load_key(tmp_path / "key")))

    def token(size: int) -> str:
        letter = next(made)
        if letter == "a":
            other.start()
            other.join(0.5)
        return letter * 2 * size

    monkeypatch.setattr(secrets, "token_hex", token)
    keys.append(load_key(tmp_path / "key"))
    other.join()
    assert keys == [load_key(tmp_path / "key")] * 2
