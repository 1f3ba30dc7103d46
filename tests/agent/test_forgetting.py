"""Observations that later turns do not see: what the engine holds, what is recorded, and what a training pass reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_environment import CountingEnvironment, toy_tasks

from stages.agent.branching import Fork
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.forgetting import View, hidden_spans, views, visible, with_hidden
from stages.agent.logprobs import States, predicting_states, token_logprobs
from stages.agent.recorded_engine import RecordedEngine
from stages.agent.rollout import Labels, attempts, collect, turn_key
from stages.agent.shared_prefixes import sharing_states
from stages.annotation.correct_paths import path_episode
from stages.annotation.nodes import node_schema
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.engine.engine import Sampling, Turn
from stages.engine.torch_engine import TorchEngine
from stages.environments.protocol import Step
from stages.environments.registry import load_domain
from stages.records.episode import Episode, episode_from, episode_row, episode_schema, read_rows, write_table
from stages.training.common.batches import take, trajectory_batch
from stages.training.common.documents import encode
from stages.training.common.hidden import Hidden, read_lengths, seen

LABELS, SAMPLING = Labels(3), Sampling(max_tokens=6)


class Forgetting(CountingEnvironment):
    """Every action from the second on hides an observation: the newest, or every third time that before it."""

    def step(self, action: str) -> Step:
        step = super().step(action)
        count = len(self.actions)
        back = 2 if count % 3 == 0 else 1
        return replace(step, forgets=back if count > 1 else 0)


class Remembering(RecordedEngine):
    """Says recorded turns, and knows what each session holds when a turn is requested."""

    def __init__(self, turns: dict[int, Turn]) -> None:
        super().__init__(turns)
        self.held: dict[int, list[int]] = {}
        self.shown: list[list[int]] = []

    def open(self, token_ids: Sequence[int], prefix: Any | None = None) -> int:
        session = super().open(token_ids)
        self.held[session] = [*(prefix or ()), *token_ids]
        return session

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        self.held[session] += token_ids

    def snapshot(self, session: int, length: int | None = None) -> Any:
        return tuple(self.held[session][:length])

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        super().request(session, key, sampling)
        self.shown.append(list(self.held[session]))
        self.held[session] += self._turns[key].token_ids


@pytest.mark.parametrize("context", ["soft", "hard"])
def test_after_a_rejection_the_prompt_has_no_token_of_the_result(chat: Chat, tmp_path: Path, context: str) -> None:
    """Contract: with context hard nothing of the rejected result's text is left, and all else is, its empty message included;
    with soft all of it stays, and the judgment."""
    domain = load_domain("search", {"judge": {"context": context}, "max_turns": 12, "echo_query": True})
    task = next(task for task in domain.build(list(domain.recipes(8, 3)), tmp_path, 1) if task.difficulty == 1)
    hop = task.spec["chain"][0]
    good = f"search {hop['name']} {hop['relation']}"
    actions = [good, "jump", "judge no", good, "judge yes", f"answer {hop['value']}"]
    turns = {}
    for place, action in enumerate(actions):
        tokens = tuple(chat.assistant_tokens(action))
        turns[turn_key(LABELS, task.task_id, 0, place)] = Turn(0, tokens, (-1.0,) * len(tokens), "stop")
    engine = Remembering(turns)
    with EnvironmentPool(lambda: domain.make(tmp_path)) as pool:
        (episode,) = collect(engine, chat, pool, attempts([task], 1), SAMPLING, LABELS, max_length=4000)
    assert episode.success
    (result, refusal, go_on) = (turn.observation for turn in episode.turns[:3])

    def prompt(*shown: str) -> list[int]:
        tokens = chat.prompt_tokens(task.prompt)
        for action, observation in zip(actions, shown, strict=False):
            tokens += [*chat.assistant_tokens(action), *chat.observation_tokens(observation)]
        return tokens

    assert engine.shown[2] == prompt(result, refusal), "until it is judged, it is there"
    assert engine.shown[3] == prompt("" if context == "hard" else result, refusal, go_on)
    assert engine.shown[5][: len(engine.shown[3])] == engine.shown[3], "for the rest of the episode"
    assert episode.forgotten == ([[0, 2]] if context == "hard" else [])
    whole = [message["content"] for message in episode.messages]
    assert whole[2] == result, "records keep everything"
    assert episode.token_ids[: episode.turns[3].start] == prompt(result, refusal, go_on)


def test_views_of_a_row() -> None:
    """Ten tokens; 2 and 3 are hidden from 5 on, 6 from 8 on."""
    assert views(10, []) == [View(list(range(10)), 0)]
    found = views(10, [(2, 4, 5), (6, 7, 8)])
    assert found == [View([0, 1, 2, 3, 4], 0), View([0, 1, 4, 5, 6, 7], 5), View([0, 1, 4, 5, 7, 8, 9], 8)]
    assert visible(range(10), [(2, 4, 5), (6, 7, 8)]) == found[-1].columns
    assert views(5, [(2, 4, 5)]) == [View([0, 1, 2, 3, 4], 0)], "nothing comes after it"


def test_hidden_spans_leave_the_message_and_what_closes_a_turn(chat: Chat) -> None:
    """A turn that was cut is closed by tokens of the environment, which stay."""
    cut = chat.assistant_tokens("search x")[:-1]
    answer = [*chat.closing_tokens(cut), *chat.observation_tokens("a page of text")]
    judged = chat.assistant_tokens("judge no")
    tokens = [*chat.prompt_tokens("find it"), *cut, *answer, *judged]
    start = len(tokens) - len(judged) - len(answer) - len(cut)
    turns = [(start, start + len(cut)), (len(tokens) - len(judged), len(tokens))]
    ((first, stop, since),) = hidden_spans(chat, tokens, turns, [[0, 1]])
    assert since == len(tokens)
    assert chat.tokenizer.decode(tokens[first:stop]) == "a page of text"
    left = tokens[turns[0][1] : first] + tokens[stop : turns[1][0]]
    assert left == [*chat.closing_tokens(cut), *chat.observation_tokens("")]


def play(policy: Any, chat: Chat, plan: Any = None, width: int = 16) -> list[Episode]:
    engine = TorchEngine(policy.model, [chat.end_of_turn], width, 400)
    with EnvironmentPool(Forgetting) as pool:
        requests = attempts(toy_tasks(6, turns=5), 2)
        found = collect(engine, chat, pool, requests, SAMPLING, LABELS, max_length=400, width=width, plan=plan)
    assert not engine._sessions
    return found


def trained(policy: Any, episodes: Sequence[Episode], states: States, forgets: bool = True) -> float:
    """The largest difference between log-probabilities of a training pass and those of the engine."""
    batch = trajectory_batch(episodes)
    micro = take(batch, range(batch.size))
    with torch.no_grad():
        again = token_logprobs(policy.model, micro.token_ids, micro.mask, states=seen(states, micro) if forgets else states)
    return float((again - micro.logprobs_old).abs().max())


@pytest.mark.parametrize("states", [predicting_states, sharing_states])
def test_a_training_pass_reads_what_the_turns_saw(policy: Any, chat: Chat, states: States) -> None:
    """Contract: importance ratios of the policy that played are 1, whatever was hidden between its turns."""
    episodes = play(policy, chat)
    assert sum(len(episode.forgotten) for episode in episodes) > 8
    assert any(by - turn == 2 for episode in episodes for turn, by in episode.forgotten)
    assert trained(policy, episodes, states) < 1e-5
    assert trained(policy, episodes, states, forgets=False) > 1e-4, "the engine did not have the whole episode"
    assert play(policy, chat, width=3) == episodes, "episodes do not depend on what runs beside them"


class ForkOnce:
    """Starts with one episode, and forks it after its third turn until the group is full."""

    candidates = 0

    def initial(self, size: int) -> int:
        return 1

    def grow(self, paths: Sequence[Any], free: int, *key: object) -> list[Fork]:
        longest = max(range(len(paths)), key=lambda row: len(paths[row].entropies))
        ready = len(paths[longest].entropies) == 3 and paths[longest].alive and free
        return [Fork(longest, 3)] * free if ready else []


def test_branches_see_what_their_parent_saw(policy: Any, chat: Chat) -> None:
    branches = [episode for episode in play(policy, chat, ForkOnce()) if episode.parent]
    assert any(by < 3 for episode in branches for _, by in episode.forgotten)
    assert trained(policy, branches, predicting_states) < 1e-5


def test_tables_keep_what_was_forgotten(policy: Any, chat: Chat, tmp_path: Path) -> None:
    """Contract: a column only where something is; the spans follow from it and the tokens."""
    episodes = play(policy, chat)
    rows = [episode_row(episode) for episode in episodes]
    write_table(tmp_path / "episodes.parquet", episode_schema(rows), rows)
    for episode, row in zip(episodes, read_rows(tmp_path / "episodes.parquet"), strict=True):
        stored = episode_from(row)
        assert (stored.forgotten, stored.hidden) == (episode.forgotten, [])
        assert with_hidden(chat, stored).hidden == episode.hidden
    plain = [{**row, "forgotten": []} for row in rows]
    assert "forgotten" not in episode_schema(plain).names


def test_micro_batches_are_planned_by_what_is_read(policy: Any, chat: Chat) -> None:
    """By hand: an episode of the tokens 0 to 9 whose tokens 4 and 9 are trained and that forgets 2 and 3 at 5 is read as 0 to 4,
    then as 0, 1, 4 to 9."""
    episode = play(policy, chat)[0]
    batch = trajectory_batch([episode])
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, [4, 9]] = True
    small = batch.with_(token_ids=torch.arange(10)[None], mask=mask)
    assert read_lengths(small, Hidden(torch.tensor([[[2, 4, 5], [0, 0, 0]]]))) == [5 + 8]


def test_demonstrations_that_forget_are_a_document_for_each_stretch(chat: Chat) -> None:
    """Contract: each turn is learnt once, after what it would have seen."""
    said = ["search x", "judge no", "search y", "answer z"]
    shown = ["find it", "a page", "search again", "another page"]
    messages = [
        {"role": role, "content": text}
        for pair in zip(shown, said, strict=True)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    episode = Episode("e", "t", "d", "t", 0, "expert", "", 0.0, 1.0, 0, messages=messages, forgotten=[[0, 1]])
    documents = encode(chat, [episode], 500)
    whole = chat.encode_demonstration(messages)
    assert documents.size == 2
    first, second = (documents.token_ids[row, : documents.lengths[row]].tolist() for row in range(2))
    assert first == whole.token_ids[: whole.spans[1][1]]
    hidden = chat.encode_demonstration([*messages[:2], {"role": "user", "content": ""}, *messages[3:]])
    assert second == hidden.token_ids
    learnt = [
        chat.tokenizer.decode(documents.token_ids[row][documents.mask[row]].tolist(), skip_special_tokens=True)
        for row in range(2)
    ]
    assert learnt == ["search xjudge no", "search yanswer z"]
    plain = encode(chat, [replace(episode, forgotten=[])], 500)
    assert (plain.size, int(plain.mask.sum())) == (1, int(documents.mask.sum()))


def test_trees_grow_from_what_the_policy_saw(policy: Any, chat: Chat) -> None:
    """Contract: every path of a tree is an episode of the policy, forgetting included, also where the tree was left and entered
    again; stored rows say so in a column that other trees lack."""
    engine = TorchEngine(policy.model, [chat.end_of_turn], 16, 400)
    params = Annotate(iterations=12, expand_k=2, max_depth=6, sampling={"max_tokens": 6})
    with EnvironmentPool(Forgetting) as pool:
        trees = Search(engine, chat, pool, params, 3, 400).grow(toy_tasks(6, turns=5))
    assert not engine._sessions
    episodes = []
    for tree in trees:
        rows = tree.rows()
        ends = [node.index for node in tree.nodes if node.ended]
        episodes += [with_hidden(chat, path_episode(rows, tree.path(index), "toy")) for index in ends]
        assert ("forgets" in node_schema(params, rows).names) == any(node.edge.forgets for node in tree.nodes)
    assert sum(len(episode.forgotten) for episode in episodes) > 8
    assert trained(policy, episodes, predicting_states) < 1e-5
    assert trained(policy, episodes, predicting_states, forgets=False) > 1e-4
