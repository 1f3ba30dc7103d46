"""TRL reads exported files and trains the same tokens as this project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.agent.chat import Chat
from stages.agent.policy import load_policy
from stages.exchange.episodes import episode_rows
from stages.exchange.records import write_records
from stages.records.episode import Episode, Owner, TurnRecord
from stages.training.common.documents import encode
from stages.training.rl.pairs import imported_pair

trl = pytest.importorskip("trl", reason="needs the extra `interop`: pip install 'bellwether[interop]'")
from datasets import load_dataset  # noqa: E402  # after the skip
from trl.data_utils import extract_prompt, is_conversational  # noqa: E402


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Any:
    return load_policy(tiny_policy, attention="sdpa")


@pytest.fixture(scope="module")
def chat(policy: Any) -> Chat:
    return Chat(policy.tokenizer)


def episodes(chat: Chat) -> list[Episode]:
    """Three episodes of one to three turns with their tokens."""
    found = []
    for count in (1, 2, 3):
        messages = [{"role": "user", "content": f"take the key {count}"}]
        episode = Episode(f"e{count}", f"t{count}", "toy", "g", 0, "p", "", 1.0, 1.0, 0, messages=messages)
        for turn in range(count):
            last = turn + 1 == count
            observation = "" if last else "you see a box"
            episode.turns.append(TurnRecord(f"go north {turn}", observation, True, float(last), 0.0, "", "", 0, 0))
            messages.append({"role": "assistant", "content": f"go north {turn}"})
            messages += [] if last else [{"role": "user", "content": observation}]
        encoded = chat.encode_demonstration(messages)
        episode.token_ids, episode.owner, episode.turn = encoded.token_ids, encoded.owner, encoded.turn
        episode.logprob = [-0.25 if owner == Owner.POLICY else 0.0 for owner in encoded.owner]
        episode.reward, episode.terminated = 1.0, True
        found.append(episode)
    return found


def loaded(rows: list[dict[str, Any]], folder: Path) -> Any:
    """Rows, loaded from an exported file as a user does."""
    path = folder / "rows.parquet"
    write_records(path, rows)
    return load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(folder / "cache"))


def settings(kind: Any, folder: Path, **more: Any) -> Any:
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False, "save_strategy": "no"}
    return kind(output_dir=str(folder / "out"), max_steps=1, per_device_train_batch_size=2, **quiet, **more)


def sft_tokens(policy: Any, rows: list[dict[str, Any]], folder: Path, step: bool = False, **more: Any) -> list[tuple[list, list]]:
    """(token ids, those that are trained on) of each row, as TRL's SFT prepares them; with `step`, after a training step."""
    trainer = trl.SFTTrainer(
        model=policy.model,
        args=settings(trl.SFTConfig, folder, **more),
        train_dataset=loaded(rows, folder),
        processing_class=policy.tokenizer,
    )
    if step:
        assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    return [
        (row["input_ids"], [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100])
        for row in trainer.train_dataset
    ]


def test_token_rows_train_the_same_tokens(policy: Any, chat: Chat, tmp_path: Path) -> None:
    """Contract: TRL uses an exported episode's tokens without re-tokenising and trains on those of the policy."""
    shown = episodes(chat)
    documents = encode(chat, shown, 640)
    ours = [documents.token_ids[row][documents.mask[row]].tolist() for row in range(documents.size)]
    found = sft_tokens(policy, episode_rows(shown, "tokens", {}), tmp_path, step=True)
    assert found == [(one.token_ids, trained) for one, trained in zip(shown, ours, strict=True)]


def test_turn_rows_train_each_policy_token_once(policy: Any, chat: Chat, tmp_path: Path) -> None:
    """Contract: TRL trains on the action and its end in each row, and over all rows on each policy token once, as this project
    does."""
    shown = episodes(chat)
    rows = episode_rows(shown, "turns", {})
    assert all(is_conversational(row) for row in rows)
    documents = encode(chat, shown, 640)
    ours = [token for row in range(documents.size) for token in documents.token_ids[row][documents.mask[row]].tolist()]
    assert [token for _, trained in sft_tokens(policy, rows, tmp_path) for token in trained] == ours


def test_message_rows_are_rendered_to_the_same_tokens(policy: Any, chat: Chat, tmp_path: Path) -> None:
    shown = episodes(chat)
    rows = episode_rows(shown, "messages", {})
    assert [ids for ids, _ in sft_tokens(policy, rows, tmp_path)] == [one.token_ids for one in shown]


def test_dpo_compares_the_same_tokens(policy: Any, chat: Chat, tmp_path: Path) -> None:
    """Contract: TRL's DPO compares the same tokens after the same history, and extracts the same prompt where it is missing."""
    prompt = [{"role": "user", "content": "take the key"}]
    longer = [*prompt, {"role": "assistant", "content": "go"}, {"role": "user", "content": "you see a box"}]
    rows = [
        {
            "prompt": start,
            "chosen": [{"role": "assistant", "content": "open the box"}],
            "rejected": [{"role": "assistant", "content": "close the door now"}],
            **{"chosen_value": 1.0, "rejected_value": 0.0, "weight": 1.0, "task_id": "t", "domain": "toy"},
        }
        for start in (prompt, longer)
    ]
    trainer = trl.DPOTrainer(
        model=policy.model,
        args=settings(trl.DPOConfig, tmp_path),
        train_dataset=loaded(rows, tmp_path),
        processing_class=policy.tokenizer,
    )
    for row, found in zip(rows, trainer.train_dataset, strict=True):
        pair = imported_pair({**row, "pair_id": "p"}, chat)
        assert found["prompt_ids"] == list(pair.history)
        assert found["chosen_ids"] == list(pair.win.token_ids)
        assert found["rejected_ids"] == list(pair.lose.token_ids)
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    whole = {side: [*rows[1]["prompt"], *rows[1][side]] for side in ("chosen", "rejected")}
    assert extract_prompt(whole)["prompt"] == rows[1]["prompt"]
