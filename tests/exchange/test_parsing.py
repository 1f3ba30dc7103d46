"""Parsing of other tools' records, and the reasons for which they are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.exchange.parsing import Demonstration, Preference, parse
from stages.exchange.records import read_records, write_records
from stages.records.episode import read_rows
from stages.records.messages import plain_messages


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def agent(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TALK = [user("open the box"), agent("take key"), user("you have it"), agent("open box")]


def test_demonstration_formats_parse_alike() -> None:
    """Contract: every format gives the same conversation; of prompt and completion only the completion is trained on."""
    assert parse({"messages": TALK}) == Demonstration(TALK, 0)
    assert parse({"prompt": TALK[:3], "completion": TALK[3:], "task_id": "t"}) == Demonstration(TALK, 1, "t")
    assert parse({"prompt": "open the box", "completion": "take key"}) == Demonstration(TALK[:2], 0)
    assert parse({"messages": TALK, "prompt": None, "label": True, "score": 3}) == Demonstration(TALK, 0)
    with_system = [{"role": "system", "content": "be brief"}, {**TALK[0], "name": None, "tool_calls": None}, *TALK[1:]]
    assert parse({"messages": with_system}) == Demonstration([user("be brief\nopen the box"), *TALK[1:]], 0)


def test_preference_formats_parse_alike() -> None:
    """Contract: a missing prompt is the common beginning of both sides, up to a user turn, as TRL extracts it."""
    wanted = Preference(TALK[:3], [agent("open box")], [agent("go north")])
    assert parse({"prompt": TALK[:3], "chosen": TALK[3:], "rejected": [agent("go north")]}) == wanted
    assert parse({"chosen": TALK, "rejected": [*TALK[:3], agent("go north")]}) == wanted
    assert parse({"prompt": "a", "chosen": "b", "rejected": "c"}) == Preference([user("a")], [agent("b")], [agent("c")])
    longer = parse({"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [agent("go"), user("a wall")], "weight": 0.5})
    assert longer == Preference(TALK[:1], TALK[1:], [agent("go")], 0.5)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "a record must have messages; prompt and completion; or chosen"),
        ({"prompt": TALK[:1], "data_source": "x"}, "this one has data_source, prompt"),
        ({"messages": []}, "messages must be a non-empty list of messages"),
        ({"messages": "hello"}, "messages must be a non-empty list"),
        ({"messages": [user("a")]}, "no assistant message"),
        ({"messages": ["a"]}, r"messages\[0\] must be an object with role and content, not str"),
        ({"messages": [user("a"), {"role": "tool", "content": "b"}]}, r"messages\[1\] has the role 'tool'"),
        ({"messages": [user("a"), user("b")]}, r"messages\[1\] has the role user instead of assistant"),
        ({"messages": [agent("a")]}, r"messages\[0\] has the role assistant instead of user"),
        ({"messages": [user("a"), {"role": "assistant", "content": None}]}, r"messages\[1\] must have text as content"),
        ({"messages": [user("a"), {"role": "assistant", "content": "", "tool_calls": [{}]}]}, "has tool_calls, which is not"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": 1}]}]}, "content of type image"),
        ({"prompt": TALK[:2], "completion": "a"}, "prompt ends with an assistant turn"),
        ({"prompt": "a", "completion": [user("b")]}, r"completion\[1\] has the role user.*numbered from the prompt's first"),
        ({"prompt": "a", "completion": "b", "label": False}, "label is false"),
        ({"prompt": "a", "chosen": "b"}, "rejected is missing"),
        ({"chosen": "b", "rejected": "c"}, "no prompt; add one"),
        ({"chosen": [user("a"), agent("b")], "rejected": [user("c"), agent("b")]}, "no first user message in common"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": float("nan")}, "weight must be a number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "chosen_value": 7}, "chosen_value must be a number from 0 to 1"),
        ({"messages": TALK, "task_id": 5}, "task_id must be text"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "weight": 10**400},
            r"weight must be a number from .*, not 10{76}\.\.\.",
        ),
    ],
)
def test_malformed_records_are_rejected_with_the_reason(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(record)


def test_invalid_lines_are_reported_with_their_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages": []}\n[1]\n{broken\n\xff\n')
    lines = list(read_records(path))
    assert [number for number, _ in lines] == [1, 2, 3, 4]
    assert lines[0][1] == {"messages": []}
    assert [str(value).split(" (")[0] for _, value in lines[1:]] == [
        "a record must be a JSON object, not list",
        "not JSON",
        "not UTF-8 text",
    ]
    with pytest.raises(ValueError, match=r"must end in \.jsonl or \.parquet"):
        list(read_records(tmp_path / "a.csv"))
    with pytest.raises(ValueError, match="no rows to write"):
        write_records(path, [])
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        list(read_records(tmp_path / "b.parquet"))


def test_unreadable_line_does_not_affect_other_lines(tmp_path: Path) -> None:
    """Contract: whatever an invalid line contains, only that line is rejected, with its number."""
    long, not_text = "a number is too long", "text that is not Unicode"

    def nested(depth: int) -> str:
        return '{"a": ' + "[" * depth + "]" * depth + "}"

    bad = {nested(100_000): "values are nested too deeply", '{"a": ' + "1" * 5000 + "}": long}
    bad |= {'{"a": ["\\ud800"]}': not_text, '{"\\udfff": 1}': not_text, nested(100): "values are nested too deeply"}
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*bad, nested(99)]))
    *errors, (last, value) = read_records(path)
    assert [(number, str(error).partition(" (")[0]) for number, error in errors] == list(enumerate(bad.values(), start=1))
    assert (last, isinstance(value, dict)) == (6, True)


def test_parquet_row_of_invalid_utf8_does_not_affect_other_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.array([b"one", b"\xff", b"three"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": texts}), path)
    (one, bad, three) = read_records(path)
    assert (one, three) == ((1, {"text": "one"}), (3, {"text": "three"}))
    assert (bad[0], str(bad[1]).partition(" (")[0]) == (2, "not UTF-8 text")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_round_trip_with_same_bytes(tmp_path: Path, kind: str) -> None:
    rows = [{"messages": TALK, "weight": 0.1, "text": "é\n"}, {"messages": TALK[:2], "weight": 1 / 3, "text": ""}]
    paths = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path in paths:
        write_records(path, rows)
    assert [value for _, value in read_records(paths[0])] == rows
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_system_messages_are_accepted_only_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"messages\[2\] has the role system instead of user"):
        plain_messages([*TALK[:2], {"role": "system", "content": "now stop"}])


@pytest.mark.parametrize("change", ["footer", "page", "cut"])
def test_damaged_parquet_file_is_rejected_by_name(tmp_path: Path, change: str) -> None:
    """Contract: the error names the file and the remedy; a missing file remains a FileNotFoundError."""
    path = tmp_path / "a.parquet"
    write_records(path, [{"messages": TALK, "text": str(number)} for number in range(50)])
    data = bytearray(path.read_bytes())
    if change == "footer":
        data[-300:-100] = bytes(200)
    elif change == "page":
        data[30:60] = bytes(30)
    else:
        del data[100:140]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file .*; replace it or remove it"):
        list(read_records(path))
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file .*; delete it and run the stage again"):
        read_rows(path)
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "b.parquet")
