"""Exported episodes, pairs and models: they come back unchanged, and `datasets` and transformers read them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from curated_imports import imported, imported_episodes

from stages.agent.chat import Chat
from stages.annotation.continuations import pair_tokens
from stages.annotation.pairs import PAIR_SCHEMA
from stages.environments.search import SearchDomain
from stages.exchange import __main__ as export
from stages.exchange.episodes import conversation, episode_rows
from stages.exchange.records import read_records
from stages.records.episode import NODE_SCHEMA, Episode, read_episodes, read_rows, read_tasks, write_episodes, write_table
from stages.training.common.documents import encode
from stages.training.rl.pairs import imported_pairs


def exported(source: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    """Run `python -m stages.exchange` and read what it wrote."""
    monkeypatch.chdir(source)
    monkeypatch.setattr("sys.argv", ["export", *arguments])
    monkeypatch.setattr("stages.runtime.workers.quiet_environment", lambda *settings: None)
    assert export.main() == 0
    return [value for _, value in read_records(Path(arguments[arguments.index("--to") + 1])) if isinstance(value, dict)]


def trained_tokens(chat: Chat, episodes: Sequence[Episode]) -> Counter[tuple[str, int]]:
    """(history and token, as text) -> how often SFT trains on it."""
    documents = encode(chat, episodes, 10_000)
    found: Counter[tuple[str, int]] = Counter()
    for row in range(documents.size):
        ids = documents.token_ids[row].tolist()
        for place in documents.mask[row].nonzero()[:, 0].tolist():
            found[str(ids[:place]), ids[place]] += 1
    return found


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", ["messages", "turns"])
def test_episodes_round_trip(
    source: Path, lines: list[str], chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, kind: str
) -> None:
    """Contract: an exported and imported episode keeps messages, rewards, outcome and keys; SFT trains the same tokens, each
    once; and a second export gives the same rows."""
    path = str(tmp_path / f"out.{kind}")
    rows = exported(source, monkeypatch, "episodes", "--domain", "search", "--format", form, "--successes", "--to", path)
    whole = [one for one in read_episodes(source / "data/rollouts/search/episodes.parquet") if one.success]
    assert len(rows) == (len(whole) if form == "messages" else sum(len(one.turns) for one in whole))
    once = {repr(row["messages"] if form == "messages" else (row["prompt"], row["completion"])) for row in rows}
    folder = imported(tmp_path, lines, rows, kind)
    back = imported_episodes(folder)
    assert len(back) == len(once), "duplicates are dropped"
    texts = {str(conversation(one)): one for one in whole}
    if form == "messages":
        for one in back:
            first = texts[str(conversation(one))]
            assert replace(
                one, **{name: getattr(first, name) for name in ("episode_id", "policy_hash", "seed", "params_hash")}
            ) == (replace(first, token_ids=[], owner=[], turn=[], logprob=[], reward_terms=one.reward_terms))
        known = {key: value for row in rows for key, value in [(str(row["messages"]), row)]}
        for row in episode_rows(back, "messages", {}):
            assert row["messages"] == known[str(row["messages"])]["messages"]
            assert (row["reward"], row["success"]) == (1.0, True)
    distinct = list({str(one.messages): one for one in whole}.values())
    assert set(trained_tokens(chat, back)) == set(trained_tokens(chat, distinct))
    if form == "messages":
        assert trained_tokens(chat, back) == trained_tokens(chat, distinct)


def write_search_tree(source: Path, chat: Chat) -> None:
    """Write a search tree of the first training task as annotate does: a right and a wrong answer, and a turn before both."""
    task = next(task for task in read_tasks(source / "data/curated/search/tasks.parquet") if task.split == "train")
    environment = SearchDomain().make(source / "data/curated/search/worlds")
    environment.reset(task)
    query = SearchDomain().expert(environment)
    page = environment.step(str(query)).observation.text
    right = f"answer {task.spec['answer']}"
    shapes = [(-1, "", task.prompt, 0.0), (0, query, page, 0.0), (0, "answer nobody", "", 0.0)]
    shapes += [(1, right, "Answered.", 1.0), (1, "answer no one", "Answered.", 0.0)]
    nodes = []
    for node, (parent, action, observation, reward) in enumerate(shapes):
        root, ends = node == 0, str(action).startswith("answer")
        after = chat.prompt_tokens(task.prompt) if root else [] if ends else chat.observation_tokens(observation)
        nodes.append(
            {
                **dict.fromkeys(NODE_SCHEMA.names, 0),
                **{"task_id": task.task_id, "node": node, "parent": parent, "depth": node, "action": action},
                **{"token_ids": [] if root else chat.assistant_tokens(str(action)), "logprob": [], "context_ids": after},
                **{"N": 2, "W": reward, "n_success": int(reward), "n_rollouts": 2, "reward": reward, "terminal": ends},
                **{"truncated": False, "state_key": "", "observation": "" if root else observation, "prior": 0.0},
            }
        )
    pairs = [
        {"task_id": task.task_id, "parent": 1, "win": 3, "lose": 4, "margin": 0.5, "n_win": 2, "n_lose": 2, "weight": 0.5},
        {"task_id": task.task_id, "parent": 0, "win": 1, "lose": 2, "margin": 0.25, "n_win": 2, "n_lose": 2, "weight": 1.0},
    ]
    write_table(source / "data/annotated/search/nodes.parquet", NODE_SCHEMA, nodes)
    write_table(source / "data/annotated/search/pairs.parquet", PAIR_SCHEMA, pairs)


@pytest.mark.parametrize("level", ["step", "trajectory"])
def test_pairs_round_trip(
    source: Path, lines: list[str], chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Contract: exported and imported pairs keep histories, continuations, weights and values; token for token if the policy's
    text has the tokenizer's own encoding."""
    write_search_tree(source, chat)
    path = str(tmp_path / "pairs.jsonl")
    rows = exported(source, monkeypatch, "pairs", "--domain", "search", "--level", level, "--to", path)
    assert [len(row["chosen"]) for row in rows] == ([1, 1] if level == "step" else [1, 3])
    folder = imported(tmp_path, lines, rows)
    stored = read_rows(folder / "pairs.parquet")
    for row, back in zip(rows, stored, strict=True):
        assert {key: back[key] for key in row if key in back} == {key: value for key, value in row.items() if key in back}
    trees = [read_rows(source / f"data/annotated/search/{name}.parquet") for name in ("nodes", "pairs")]
    assert imported_pairs(folder, chat, 640) == pair_tokens(*trees, level)
    with pytest.raises(ValueError, match=r"imported/teacher-000001 has \d+ tokens, over model\.max_length \(20\)"):
        imported_pairs(folder, chat, 20)


def test_no_pairs_are_refused(
    source: Path, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: without trees, as by default, there is no empty file, but a message that says how to get pairs."""
    write_search_tree(source, chat)
    write_table(source / "data/annotated/search/pairs.parquet", PAIR_SCHEMA, [])
    monkeypatch.chdir(source)
    monkeypatch.setattr("sys.argv", ["export", "pairs", "--domain", "search", "--to", str(tmp_path / "pairs.jsonl")])
    monkeypatch.setattr("stages.runtime.workers.quiet_environment", lambda *settings: None)
    assert export.main() == 2
    assert "has no pairs: set annotate.tasks to a number above 0" in capsys.readouterr().err
    assert not (tmp_path / "pairs.jsonl").exists()


def test_no_rollouts_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: without rollouts, as by default, there is no empty file, but a message that says how to get episodes."""
    run = Path(shutil.copytree(source, tmp_path / "run"))
    write_episodes(run / "data/rollouts/search/episodes.parquet", [])
    monkeypatch.chdir(run)
    monkeypatch.setattr("sys.argv", ["export", "episodes", "--domain", "search", "--to", str(tmp_path / "episodes.jsonl")])
    monkeypatch.setattr("stages.runtime.workers.quiet_environment", lambda *settings: None)
    assert export.main() == 2
    assert "has no episodes: set rollout.tasks to a number above 0" in capsys.readouterr().err
    assert not (tmp_path / "episodes.jsonl").exists()


def test_datasets_loads_every_file(source: Path, tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: `datasets` loads each kind of file with the same values, in the columns that TRL and verl expect."""
    write_search_tree(source, chat)
    from datasets import load_dataset

    wanted = {
        "messages.jsonl": (["episodes", "--domain", "search"], {"messages"}),
        "turns.parquet": (["episodes", "--domain", "search", "--format", "turns"], {"prompt", "completion"}),
        "tokens.parquet": (["episodes", "--domain", "search", "--format", "tokens"], {"input_ids", "assistant_masks"}),
        "verl.parquet": (
            ["episodes", "--domain", "search", "--format", "verl"],
            {"data_source", "prompt", "ability", "reward_model", "extra_info", "messages"},
        ),
        "tasks.parquet": (
            ["tasks", "--domain", "search", "--split", "test"],
            {"data_source", "prompt", "ability", "reward_model", "extra_info"},
        ),
        "pairs.jsonl": (["pairs", "--domain", "search"], {"prompt", "chosen", "rejected"}),
    }
    for name, (arguments, columns) in wanted.items():
        path = tmp_path / name
        rows = exported(source, monkeypatch, *arguments, "--to", str(path))
        kind = "json" if path.suffix == ".jsonl" else "parquet"
        loaded = load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
        assert columns <= set(loaded.column_names)
        assert loaded.to_list() == rows, name
    assert rows[0]["chosen"][0]["role"] == "assistant"
    task = next(task for task in read_tasks(source / "data/curated/search/tasks.parquet") if task.split == "test")
    (first, *_) = [value for _, value in read_records(tmp_path / "tasks.parquet")]
    assert isinstance(first, dict)
    assert first["prompt"] == [{"role": "user", "content": task.prompt}]
    assert json.loads(first["reward_model"]["ground_truth"]) == task.spec
    assert first["extra_info"] == {"difficulty": task.difficulty, "index": 0, "split": "test", "task_id": task.task_id}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["episodes", "--domain", "maze", "--to", "a.jsonl"], "--domain maze is not among `domains` in params.yaml: search"),
        (["episodes", "--domain", "search", "--to", "a.csv"], "a.csv must end in .jsonl or .parquet"),
        (
            ["episodes", "--domain", "search", "--source", "games", "--to", "a.jsonl"],
            "games.parquet does not exist; 'dvc repro curate",
        ),
        (
            ["episodes", "--domain", "search", "--source", "demonstrations", "--format", "tokens", "--to", "a.jsonl"],
            "has no tokens: demonstrations are tokenised only",
        ),
        (["episodes", "--domain", "search", "--model", "merged", "--to", "a.jsonl"], "add --source panel, or leave --model out"),
        (["episodes", "--domain", "search", "--source", "panel", "--to", "a.jsonl"], "'dvc repro evaluate' writes it"),
        (["import", "none.eval", "--to", "a.jsonl"], "exchange: [Errno 2] No such file or directory: 'none.eval'"),
        (["model", "mergd", "--to", "m"], "unknown model 'mergd'; did you mean 'merged'?"),
        (["model", "merged", "--to", "data"], "data already exists"),
    ],
)
def test_failed_export_gives_the_reason(
    source: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(source)
    monkeypatch.setattr("sys.argv", ["export", *arguments])
    monkeypatch.setattr("stages.runtime.workers.quiet_environment", lambda *settings: None)
    assert export.main() == 2
    assert words in capsys.readouterr().err


def test_exported_models_load_with_transformers_alone(tiny_policy: Path, tmp_path: Path) -> None:
    """Contract: transformers, without this project, loads a model and renders a conversation as rollouts do; a LoRA adapter
    becomes a full model."""
    pytest.importorskip("peft", reason="needs the extra `lora`: pip install 'bellwether[lora]'")
    import torch
    from adapters import make_adapter
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stages.agent.policy import load_policy, policy_hash
    from stages.exchange.models import write_model

    write_model(tiny_policy, tmp_path / "plain")
    assert policy_hash(tmp_path / "plain") == policy_hash(tiny_policy)
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "plain", "plain")
    write_model(adapter, tmp_path / "folded")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folded")
    messages = [{"role": "user", "content": "take the key"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    chat = Chat(tokenizer)
    tokens = torch.tensor([tokenizer.encode(ids, add_special_tokens=False)])
    assert tokens[0].tolist() == chat.prompt_tokens("take the key")
    for folder, own in ((tmp_path / "plain", tiny_policy), (tmp_path / "folded", adapter)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        ours = load_policy(own).model
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, ours(tokens).logits, atol=1e-5, rtol=1e-5)
        assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape[1] > tokens.shape[1]
