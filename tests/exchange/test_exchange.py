"""Export and import round trips: episodes and pairs are unchanged and train the same tokens; `datasets` reads every file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import make_tiny_tokenizer

from stages import curate
from stages.agent.chat import Chat
from stages.annotation.continuations import pair_tokens
from stages.annotation.pairs import PAIR_SCHEMA
from stages.environments.search import SearchDomain
from stages.exchange import __main__ as export
from stages.exchange.episodes import conversation, episode_rows
from stages.exchange.records import read_records, write_records
from stages.params import parse_params
from stages.records.episode import (
    IMPORTED,
    NODE_SCHEMA,
    Episode,
    Owner,
    read_episodes,
    read_json,
    read_rows,
    read_tasks,
    write_episodes,
    write_table,
)
from stages.reporting.sections.data import _curate_domain
from stages.runtime.stage import StageContext
from stages.runtime.validation import ParamsError
from stages.training.common.documents import encode
from stages.training.rl.demonstrations import ExternalEpisodes
from stages.training.rl.pairs import imported_pairs

PARAMS: dict[str, Any] = {
    "domains": ["search"],
    "curate": {"train": 6, "valid": 2, "test": 4},
    "resources": {"workers": 1, "threads": 1},
    "per_domain": {"search": {}},
}


class NullTracker:
    def __getattr__(self, name: str) -> Any:
        return lambda *values, **settings: None


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tiny_tokenizer())


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [json.dumps(record) for record in SearchDomain().recipes(120, 0)]


def curated(root: Path, lines: Sequence[str], imports: Sequence[str] = (), **changes: Any) -> Path:
    """The curate stage in `root`; its folder."""
    (root / "data/raw").mkdir(parents=True, exist_ok=True)
    (root / "data/raw/search.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    values = {**PARAMS, **changes, "curate": {**PARAMS["curate"], **changes.get("curate", {}), "imports": list(imports)}}
    (root / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    curate.run(StageContext("curate", "search", parse_params(values), root, NullTracker()))  # type: ignore[arg-type]
    return root / "data/curated/search"


@pytest.fixture(scope="module")
def source(lines: list[str], chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A curated domain whose demonstrations, with their tokens, serve as rollouts, and two failures."""
    root = tmp_path_factory.mktemp("source")
    folder = curated(root, lines)
    episodes = []
    for number, shown in enumerate(read_episodes(folder / "demonstrations.parquet")):
        encoded = chat.encode_demonstration(shown.messages)
        played = replace(
            shown, episode_id=f"{shown.task_id}/{number:04d}", token_ids=encoded.token_ids, owner=encoded.owner, turn=encoded.turn
        )
        played.logprob = [-0.5 if owner == Owner.POLICY else 0.0 for owner in encoded.owner]
        episodes.append(played)
    for episode in episodes[:2]:
        failure = replace(episode, episode_id=f"{episode.episode_id}-failed", turns=[*episode.turns[:-1]], reward=0.0)
        failure.turns.append(replace(episode.turns[-1], action="answer nobody", observation="Answered.", reward=0.0))
        failure.messages = [*episode.messages[:-1], {**episode.messages[-1], "content": "answer nobody"}]
        failure.reward_terms = {}
        episodes.append(failure)
    write_episodes(root / "data/rollouts/search/episodes.parquet", episodes)
    return root


def exported(source: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    """Run `python -m stages.exchange` and read what it wrote."""
    monkeypatch.chdir(source)
    monkeypatch.setattr("sys.argv", ["export", *arguments])
    monkeypatch.setattr("stages.runtime.workers.quiet_environment", lambda *settings: None)
    assert export.main() == 0
    return [value for _, value in read_records(Path(arguments[arguments.index("--to") + 1])) if isinstance(value, dict)]


def imported(root: Path, lines: Sequence[str], rows: Sequence[dict[str, Any]], kind: str = "jsonl", **changes: Any) -> Path:
    file = f"data/raw/teacher.{kind}"
    write_records(root / file, rows)
    return curated(root, lines, [file], **changes)


def imported_episodes(folder: Path) -> list[Episode]:
    return [episode for episode in read_episodes(folder / "demonstrations.parquet") if episode.policy_hash == IMPORTED]


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


def test_rejected_records_are_reported_with_file_line_and_reason(
    source: Path, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {task.task_id: task for task in read_tasks(source / "data/curated/search/tasks.parquet")}
    test = next(task for task in tasks.values() if task.split == "test")
    train = next(task for task in tasks.values() if task.split == "train")
    shown = next(
        one for one in read_episodes(source / "data/curated/search/demonstrations.parquet") if one.task_id == train.task_id
    )
    talk = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "answer Nobody"}]
    name = test.spec["start"]

    def changed_messages(*changes: tuple[int, str]) -> list[dict[str, str]]:
        messages = [dict(message) for message in shown.messages]
        for place, text in changes:
            messages[place]["content"] = text
        return messages

    rows: list[dict[str, Any]] = [
        {"messages": talk},
        {"messages": talk},
        {"messages": [{"role": "user", "content": test.prompt}, talk[1]]},
        {"messages": talk, "task_id": "search-train-nowhere"},
        {"messages": [{"role": "user", "content": test.prompt}, talk[1]], "task_id": test.task_id},
        {"messages": changed_messages((2, "Another page.")), "task_id": train.task_id},
        {"messages": [*shown.messages, {"role": "user", "content": "?"}, talk[1]], "task_id": train.task_id},
        {"messages": changed_messages((len(shown.messages) - 1, "answer Nobody")), "task_id": train.task_id},
        {"messages": talk, "domain": "textworld"},
        {"messages": [{"role": "user", "content": "word " * 700}, talk[1]]},
        {"prompt": "Who?", "completion": f"answer {name}"},
        {"prompt": talk[:1], "chosen": "answer Nobody", "rejected": "answer Somebody"},
    ]
    file = tmp_path / "data/raw/mine.jsonl"
    file.parent.mkdir(parents=True)
    answer = '"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "answer Nobody"}]'
    bad = ["{broken", f'{{{answer}, "weight": {"9" * 5000}}}', f'{{{answer}, "deep": {"[" * 5000}{"]" * 5000}}}']
    bad += [answer.join("{}").replace("Nobody", "\\ud83d"), f'{{{answer}, "deep": {"[" * 200}{"]" * 200}}}']
    file.write_text("\n".join([*map(json.dumps, rows), *bad]) + "\n", encoding="utf-8")
    folder = curated(tmp_path, lines, ["data/raw/mine.jsonl"])
    printed = capsys.readouterr().err
    for line, reason in [
        (2, "duplicate: the same as data/raw/mine.jsonl:1"),
        (3, "panel_task: it has the prompt of a task"),
        (4, "unknown_task: task_id search-train-nowhere is not a curated task"),
        (5, f"wrong_split: {test.task_id} is a test task"),
        (6, f"unlike_environment: message 2 of {train.task_id} is 'Another page.'"),
        (7, "unlike_environment: it continues after"),
        (8, "failed: replayed to its end, it does not solve"),
        (10, "too_long: it has 702 words and marks"),
        (13, "malformed: not JSON"),
        (14, "malformed: a number is too long"),
        (15, "malformed: values are nested too deeply"),
        (16, "malformed: text that is not Unicode"),
        (17, "malformed: values are nested too deeply"),
    ]:
        assert f"curate@search: rejected data/raw/mine.jsonl:{line}: {reason}" in printed
    assert "1 imported conversations have names of panel tasks in them (the first: data/raw/mine.jsonl:11)" in printed
    report = read_json(tmp_path / "reports/curate/search.json")
    assert report["imports"]["mention_panel_names"] == 1
    counts = report["imports"]["files"]["data/raw/mine.jsonl"]
    assert {key: counts[key] for key in ("records", "demonstrations", "pairs", "of_other_domains", "of_tasks")} == {
        **{"records": 17, "demonstrations": 2, "pairs": 1, "of_other_domains": 1, "of_tasks": 0}
    }
    assert report["demonstrations"]["kept"]["expert"] == sum(
        one.policy_hash == "expert" for one in read_episodes(folder / "demonstrations.parquet")
    )
    assert report["rejected"]["panel_task"] == 1
    assert "data/raw/mine.jsonl" in str(_curate_domain("search", 0, report))
    free = [one for one in imported_episodes(folder) if one.task_id.startswith("imported/")]
    assert [one.episode_id for one in free] == ["imported/mine-000001", "imported/mine-000011"]


def test_thinking_setting_separates_thoughts_from_actions(source: Path, lines: list[str], tmp_path: Path) -> None:
    """Contract: with `model.thinking`, thoughts are trained on and the environment plays the actions after them; without, they
    are part of the action, which the environment does not know."""
    shown = [one for one in read_episodes(source / "data/curated/search/demonstrations.parquet") if one.policy_hash == "expert"]
    rows = episode_rows(shown, "messages", {})
    for row in rows:
        for message in row["messages"][1::2]:
            message["content"] = f"<think>\nwhich one?\n</think>\n\n{message['content']}"
    free = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "<think>hm</think>answer No"}]}
    none = {"expert_demonstrations": 0, "noisy_demonstrations": 0}
    back = imported_episodes(imported(tmp_path / "on", lines, [*rows, free], curate=none, model={"thinking": {}}))
    by_task = {one.task_id: one for one in back if one.task_id in {known.task_id for known in shown}}
    assert len(by_task) == len(shown)
    for known in shown:
        one = by_task[known.task_id]
        assert [turn.action for turn in one.turns] == [turn.action for turn in known.turns]
        assert all(message["content"].startswith("<think>\nwhich one?\n</think>") for message in one.messages[1::2])
        assert (one.reward, one.success) == (1.0, True)
    (talk,) = (one for one in back if one.task_id.startswith("imported/"))
    assert (talk.turns[0].action, talk.messages[1]["content"]) == ("answer No", "<think>hm</think>answer No")
    off = imported_episodes(imported(tmp_path / "off", lines, [*rows, free], curate=none))
    assert [one.turns[0].action for one in off] == ["<think>hm</think>answer No"]


def test_missing_import_file_and_file_outside_data_raw_are_rejected(lines: list[str], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"curate\.imports lists data/raw/none\.jsonl, which does not exist"):
        curated(tmp_path, lines, ["data/raw/none.jsonl"])
    for name in ("data/mine.jsonl", "/tmp/a.jsonl", "data/raw/../a.jsonl", "data/raw/a.csv"):
        with pytest.raises(ParamsError, match=r"'curate\.imports' lists .* below data/raw"):
            parse_params({**PARAMS, "curate": {"imports": [name]}})
    pairs = {"algorithm": "dpo", "preference": {"source": "imported"}}
    with pytest.raises(ParamsError, match=r"curate\.imports is empty"):
        parse_params({**PARAMS, "rl": pairs})


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


def test_external_source_all_draws_whole_imported_episodes(source: Path, lines: list[str], chat: Chat, tmp_path: Path) -> None:
    """Contract: `rl.external: {source: all}` draws imported episodes of training tasks, and no parts of any."""
    shown = [one for one in read_episodes(source / "data/curated/search/demonstrations.parquet") if one.policy_hash == "expert"]
    rows = [*episode_rows(shown, "messages", {}), *episode_rows(shown, "turns", {})]
    folder = imported(tmp_path, lines, rows, curate={"expert_demonstrations": 0, "noisy_demonstrations": 0})
    tasks = {task.task_id for task in read_tasks(folder / "tasks.parquet", "train")}
    params = parse_params({**PARAMS, "rl": {"external": {"per_group": 4, "source": "all"}}}).rl.external
    external = ExternalEpisodes(imported_episodes(folder), tasks, chat, params, 640)
    assert {task: external.count(task) for task in sorted(tasks)} == {
        task: sum(one.task_id == task for one in shown) for task in sorted(tasks)
    }


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
