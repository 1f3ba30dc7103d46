"""ATIF trajectories and logs of Inspect: exported episodes come back in as they were, other tools' come in as conversations."""

from __future__ import annotations

import io
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from exported_episodes import OPENING, varied
from fuzz import mutation

from stages.exchange import __main__ as command
from stages.exchange.atif import episode_of, trajectory
from stages.exchange.documents import write_documents
from stages.exchange.foreign import Item, read_items
from stages.exchange.inspect_log import eval_log
from stages.exchange.parsing import Demonstration, parse
from stages.records.episode import Episode

TARGETS = (("atif", "x.jsonl"), ("atif", "folder"), ("inspect", "x.eval"), ("inspect", "x.json"))


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> list[Episode]:
    return varied(tmp_path_factory.mktemp("episodes") / "episodes.parquet")


@pytest.mark.parametrize(("form", "name"), TARGETS)
def test_exported_episodes_come_back_token_for_token(form: str, name: str, episodes: list[Episode], tmp_path: Path) -> None:
    for target in (tmp_path / name, tmp_path / f"again-{name}"):
        write_documents(target, form, episodes, "merged")
    assert [item.episode() for item in read_items(tmp_path / name)] == episodes
    if name != "folder":
        assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()


@pytest.mark.parametrize(("form", "name"), TARGETS)
def test_exported_episodes_are_records_of_their_task(form: str, name: str, episodes: list[Episode], tmp_path: Path) -> None:
    with_turns = [episode for episode in episodes if episode.turns and episode.inherited < len(episode.turns)]
    write_documents(tmp_path / name, form, with_turns, "merged")
    records = [record for item in read_items(tmp_path / name) for record in item.records()]
    assert [record["task_id"] for record in records] == [episode.task_id for episode in with_turns]
    for record, episode in zip(records, with_turns, strict=True):
        found = parse(record)
        assert isinstance(found, Demonstration)
        replies = [message["content"] for message in episode.messages if message["role"] == "assistant"]
        assert [message["content"] for message in found.messages if message["role"] == "assistant"] == replies
        assert found.given == (episode.inherited if form == "atif" else 0)
        assert record["domain"] == "textworld"


def test_atif_holds_what_the_format_has_a_place_for(episodes: list[Episode]) -> None:
    won, thinking, branch, untold, *_ = map(trajectory, episodes)
    opening, first, last = won["steps"]
    assert [step["step_id"] for step in won["steps"]] == [1, 2, 3]
    assert (opening["source"], opening["message"]) == ("user", OPENING)
    assert first["tool_calls"] == [{"tool_call_id": "turn-1", "function_name": "act", "arguments": {"action": "go east"}}]
    assert first["observation"]["results"][0]["source_call_id"] == "turn-1"
    assert first["observation"]["results"][0]["content"] == "A lamp."
    assert last["metrics"] == {
        "prompt_tokens": 6,
        "completion_tokens": 2,
        "prompt_token_ids": [1, 2, 3, 10, 20, 30],
        "completion_token_ids": [11, 21],
        "logprobs": [-1.5, -0.125],
    }
    assert won["final_metrics"]["extra"] == {"reward": 1.0, "success": True, "format": 0.5} | {"success": 1.0}
    assert (thinking["steps"][1]["reasoning_content"], thinking["steps"][1]["message"]) == ("<think>east?</think>\n", "go east")
    assert [step.get("is_copied_context") for step in branch["steps"]] == [None, True, None]
    assert "metrics" not in untold["steps"][1]


def test_atif_says_who_spoke(episodes: list[Episode]) -> None:
    """An agent for each role; which play, and in which order, for tools that know nothing of this project."""
    plain = trajectory(episodes[0])
    assert plain["agent"]["name"] == "bellwether"
    assert not {"role", "play", "moves"} & set(plain["extra"])
    planner = replace(episodes[0], role="planner", play="t1/0", moves=[0, 2])
    document = trajectory(planner)
    assert document["agent"]["name"] == "bellwether (planner)"
    assert [document["extra"][name] for name in ("role", "play", "moves")] == ["planner", "t1/0", [0, 2]]
    assert episode_of(json.loads(json.dumps(document))) == planner


def test_inspect_scores_outcomes_and_counts_attempts_as_epochs(episodes: list[Episode]) -> None:
    log = eval_log(episodes, "merged")
    assert [(sample["id"], sample["epoch"]) for sample in log["samples"]] == [
        ("t1", 1), ("t1", 2), ("t1", 3), ("t2", 1), ("t2", 2), ("t3", 1),
    ]  # fmt: skip
    assert log["samples"][0]["scores"] == {"success": {"value": 1.0}, "reward": {"value": 1.0}, "format": {"value": 0.5}}
    assert log["samples"][1]["limit"]["type"] == "turn"
    assert log["eval"]["config"] == {"epochs": 3}
    (success,) = [score for score in log["results"]["scores"] if score["name"] == "success"]
    assert success["metrics"]["mean"]["value"] == pytest.approx(1 / 6)
    # Bernoulli with one success among six: sd sqrt(1/6 * 5/6 * 6/5), by sqrt(6)
    assert success["metrics"]["stderr"]["value"] == pytest.approx((1 / 6 * 5 / 6 * 6 / 5 / 6) ** 0.5)


FOREIGN_ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.8",
    "agent": {"name": "other", "version": "2"},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "List the files."}]},
        {
            "step_id": 3,
            "source": "agent",
            "message": "",
            "reasoning_content": "ls will do",
            "tool_calls": [{"tool_call_id": "c", "function_name": "bash", "arguments": {"command": "ls"}}],
            "observation": {"results": [{"source_call_id": "c", "content": "a.txt"}, {"content": None}]},
        },
        {"step_id": 4, "source": "agent", "message": "There is a.txt."},
    ],
}
FOREIGN_SAMPLE: dict[str, Any] = {
    "id": 1,
    "epoch": 1,
    "input": "List the files.",
    "target": "",
    "attachments": {"0" * 32: "Be brief."},
    "messages": [
        {"role": "system", "content": f"attachment://{'0' * 32}"},
        {"role": "user", "content": "List the files."},
        {
            "role": "assistant",
            "content": [{"type": "reasoning", "reasoning": "ls will do"}, {"type": "text", "text": ""}],
            "tool_calls": [{"id": "c", "function": "bash", "arguments": {"command": "ls"}}],
        },
        {"role": "tool", "content": "a.txt", "tool_call_id": "c"},
        {"role": "assistant", "content": "There is a.txt."},
    ],
}
EXPECTED = [
    {"role": "user", "content": "Be brief.\nList the files."},
    {"role": "assistant", "content": '{"arguments": {"command": "ls"}, "name": "bash"}'},
    {"role": "user", "content": "a.txt"},
    {"role": "assistant", "content": "There is a.txt."},
]


def foreign_log() -> dict[str, Any]:
    return {"version": 2, "status": "success", "eval": {"task": "other"}, "samples": [FOREIGN_SAMPLE]}


def zstd_eval(path: Path) -> None:
    """A `.eval` whose sample is compressed with zstd, as Inspect writes it and Python's zipfile can't before 3.14."""
    raw = json.dumps(FOREIGN_SAMPLE).encode()
    packed = pa.compress(raw, codec="zstd", asbytes=True)
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as made:
        made.writestr("samples/1_epoch_1.json", packed)
    content = bytearray(held.getvalue())
    central = content.index(b"PK\x01\x02")
    for start, sizes in ((8, 18), (central + 10, central + 20)):
        content[start : start + 2] = (93).to_bytes(2, "little")
        content[sizes : sizes + 8] = len(packed).to_bytes(4, "little") + len(raw).to_bytes(4, "little")
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["atif.json", "atif.jsonl", "log.json", "log.eval"])
def test_other_tools_trajectories_become_conversations(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "log.eval":
        zstd_eval(path)
    else:
        path.write_text(json.dumps(foreign_log() if name.startswith("log") else FOREIGN_ATIF), encoding="utf-8")
    (item,) = read_items(path)
    (record,) = item.records()
    assert record == {"messages": EXPECTED}
    with pytest.raises(ValueError, match=r"only episodes exported by this project can become episodes"):
        item.episode()


def test_copied_context_and_embedded_trajectories(tmp_path: Path) -> None:
    copied = [{**step, "is_copied_context": True} if step["step_id"] < 4 else step for step in FOREIGN_ATIF["steps"]]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**FOREIGN_ATIF, "steps": copied, "subagent_trajectories": [FOREIGN_ATIF]}), encoding="utf-8")
    (item,) = read_items(path)
    assert item.records() == [{"prompt": EXPECTED[:3], "completion": EXPECTED[3:]}, {"messages": EXPECTED}]


REFUSED: dict[str, tuple[Any, str]] = {
    "a.json": ({"steps": []}, r"a\.json is neither an ATIF trajectory \(schema_version\) nor a log of Inspect"),
    "b.json": ({**FOREIGN_ATIF, "steps": "none"}, r"b\.json: steps must be a list of objects"),
    "c.json": ({**foreign_log(), "samples": []}, r"c\.json: the log has no samples"),
    "d.jsonl": ([1, 2], r"d\.jsonl: a record must be a JSON object, not list"),
    "e.eval": ("nonsense", r"e\.eval is not a readable \.eval file"),
    "f.csv": ("", r"f\.csv must end in \.json, \.jsonl, \.eval, or be a folder"),
    "g.json": (
        {**FOREIGN_ATIF, "steps": [{"source": "agent", "message": [{"type": "image", "source": {"path": "x.png"}}]}]},
        r"g\.json: step 1 has content of type image; only text is supported",
    ),
    "h.json": ({**FOREIGN_ATIF, "steps": FOREIGN_ATIF["steps"][:2]}, r"h\.json: there is no message of the agent to train on"),
    "i.json": ({**FOREIGN_ATIF, "extra": {"bellwether": {}}}, r"i\.json: malformed"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_read_is_refused_by_file(name: str, tmp_path: Path) -> None:
    value, message = REFUSED[name]
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        [item.records() for item in read_items(path)]


def test_changed_tokens_are_refused(episodes: list[Episode], tmp_path: Path) -> None:
    value = trajectory(episodes[0])
    value["steps"][2]["metrics"]["prompt_token_ids"][4] = 7
    (tmp_path / "x.json").write_text(json.dumps(value), encoding="utf-8")
    (item,) = read_items(tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"x\.json: the tokens of t1/0000 do not continue those of the turn before"):
        item.episode()


def test_the_command_writes_and_reads(
    episodes: list[Episode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write_documents(tmp_path / "given.eval", "inspect", episodes[:2], "sft")
    monkeypatch.chdir(tmp_path)
    for target, what in (("back.parquet", "2 episodes"), ("back.jsonl", "2 conversations")):
        monkeypatch.setattr("sys.argv", ["exchange", "import", "given.eval", "--to", target])
        assert command.main() == 0
        assert capsys.readouterr().out == f"exchange: wrote {what} to {target}\n"
    monkeypatch.setattr("sys.argv", ["exchange", "import", "back.jsonl", "--to", "x.parquet"])
    assert command.main() == 2
    assert "back.jsonl:1 is neither an ATIF trajectory" in capsys.readouterr().err
    assert command.read_episodes(tmp_path / "back.parquet") == episodes[:2]


def test_a_folder_with_other_files_is_not_replaced(episodes: list[Episode], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="holds other files than trajectories"):
        write_documents(tmp_path, "atif", episodes, "merged")
    assert (tmp_path / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize("kind", ["atif", "inspect"])
def test_mutated_documents_are_read_or_refused_by_file(kind: str, episodes: list[Episode], tmp_path: Path) -> None:
    """Contract: a document from outside becomes an episode and records, or a ValueError that names its file."""
    valid: list[Any] = [trajectory(episodes[2]), FOREIGN_ATIF] if kind == "atif" else [eval_log(episodes[:2], "x"), foreign_log()]
    path, refusals = tmp_path / "given.json", []
    for number in range(300):
        rng = random.Random(number)
        value, _ = mutation.mutated(rng, valid[number % 2], (*mutation.VALUES, *mutation.KEYS), most=3)
        path.write_text(json.dumps(value, ensure_ascii=True), encoding="utf-8")
        for read in (Item.records, Item.episode):
            try:
                for item in read_items(path):
                    read(item)
            except ValueError as error:
                refusals.append(str(error))
    assert len(refusals) > 100
    assert [text for text in refusals if str(path) not in text] == []
