"""Thoughts of reasoning models: excluded from the action, recorded token by token."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import TINY_TEMPLATE, make_tiny_tokenizer
from tokenizers import AddedToken
from toy_environment import CountingEnvironment, toy_tasks

from stages.agent.best_of_n import choose
from stages.agent.branching import Fork
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.policy import load_policy
from stages.agent.rollout import Labels, attempts, collect
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.engine.engine import Sampling, Turn
from stages.engine.torch_engine import TorchEngine
from stages.exchange.episodes import conversation
from stages.params import ParamsError, parse_params
from stages.records.episode import Owner
from stages.records.thinking import ParsedTurn, Thinking, parse_turn
from stages.training.common.batches import OVERLONG

ROOT = Path(__file__).resolve().parents[2]
MARKS = Thinking()
# Like Qwen3: the policy opens its thoughts; the template drops those of earlier turns.
QWEN = (
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|' + message['role'] + '|>\n' + text + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Like DeepSeek-R1: the generation prompt opens the thought.
R1 = QWEN.replace("{{ '<|assistant|>\n' }}", "{{ '<|assistant|>\n<think>\n' }}")
# Like Qwen3 without thinking: the generation prompt contains an empty thought.
CLOSED = QWEN.replace("{{ '<|assistant|>\n' }}", "{{ '<|assistant|>\n<think>\n\n</think>\n\n' }}")


def tokenizer(template: str, marks: str):
    """`marks`: whether the think markers are added tokens, special tokens or plain text."""
    made = make_tiny_tokenizer(template)
    if marks != "text":
        made.add_tokens([AddedToken(text, special=marks == "special", normalized=False) for text in ("<think>", "</think>")])
    return made


@pytest.fixture(params=["token", "special", "text"])
def marks(request) -> str:
    return request.param


def test_parse_turn_splits_thought_and_action() -> None:
    for text, opened, expected in [
        ("go north", False, ParsedTurn("go north", "", "go north")),
        ("<think>\nwhy?\n</think>\n\ngo north\n", False, ParsedTurn("go north", "why?", "<think>\nwhy?\n</think>\n\ngo north")),
        ("<think></think>go", False, ParsedTurn("go", "", "<think></think>go")),
        ("<think>why", False, ParsedTurn("", "why", "<think>why", False)),
        ("go <think>why", False, ParsedTurn("", "go why", "go <think>why", False)),
        ("<think>a</think>b<think>c</think>d", False, ParsedTurn("d", "abc", "<think>a</think>b<think>c</think>d")),
        ("<think>a</think>b<think>c", False, ParsedTurn("", "abc", "<think>a</think>b<think>c", False)),
        ("why</think>go", False, ParsedTurn("go", "why", "why</think>go")),
        ("why\n</think>\n\ngo", True, ParsedTurn("go", "why", "<think>\nwhy\n</think>\n\ngo")),
        ("<think>why</think>go", True, ParsedTurn("go", "why", "<think>why</think>go")),
        ("why", True, ParsedTurn("", "why", "<think>\nwhy", False)),
        ("", True, ParsedTurn("", "", "<think>", False)),
        ("</think>", False, ParsedTurn("", "", "</think>")),
    ]:
        assert parse_turn(text, MARKS, "<think>\n" if opened else "") == expected, text
    assert parse_turn(" <think>a</think>b ", None) == ParsedTurn("<think>a</think>b", "", "<think>a</think>b")


def test_the_first_end_marker_on_request() -> None:
    """A thought that quotes the marker: by the last one the quotation belongs to the thought, by the first one to the action."""
    first = Thinking(occurrence="first")
    for text, opened, expected in [
        ("<think>a</think>b", False, ParsedTurn("b", "a", "<think>a</think>b")),
        ("<think>a</think>b</think>c", False, ParsedTurn("b</think>c", "a", "<think>a</think>b</think>c")),
        ("<think>a</think>b<think>c", False, ParsedTurn("b<think>c", "a", "<think>a</think>b<think>c")),
        ("<think>why", False, ParsedTurn("", "why", "<think>why", False)),
        ("go north", False, ParsedTurn("go north", "", "go north")),
        ("why</think>go", True, ParsedTurn("go", "why", "<think>\nwhy</think>go")),
        ("why", True, ParsedTurn("", "why", "<think>\nwhy", False)),
    ]:
        assert parse_turn(text, first, "<think>\n" if opened else "") == expected, text
    assert parse_turn("<think>a</think>b</think>c", MARKS).action == "c"
    assert first.model_dump() == {"start": "<think>", "end": "</think>", "occurrence": "first"}


@pytest.mark.parametrize(
    ("text", "response", "expected"),
    [
        ("<think>a</think>b", (), True),
        ("b", (), False),
        ("<think>a</think>b<think>c", (), False),
        ("<think>a</think><r>b</r>", ("<r>", "</r>"), True),
        ("<think><r>a</r></think>b", ("<r>", "</r>"), False),
        ("<think>a</think></r>b<r>", ("<r>", "</r>"), False),
    ],
)
def test_marked_turns_have_every_marker(text: str, response: tuple[str, ...], expected: bool) -> None:
    assert parse_turn(text, Thinking(response=response)).marked is expected


def test_response_markers_are_a_list_in_params_yaml() -> None:
    given = {"start": "<think>", "end": "</think>", "response": ["<r>", "</r>"]}
    assert Thinking.model_validate(given).response == ("<r>", "</r>")
    with pytest.raises(ValueError, match="must be two different markers"):
        Thinking.model_validate({**given, "response": ["<r>"]})


@pytest.mark.parametrize("template", [QWEN, R1, CLOSED])
def test_encoded_messages_are_read_back(template: str, marks: str) -> None:
    """Contract: a message encoded for SFT is read back as the same action, thought and message; a demonstration without a thought
    is not written into a thought that the template has opened."""
    chat = Chat(tokenizer(template, marks), MARKS)
    opens = template == R1
    for thought in ("", "why? <|end|> or 'not'"):
        message = f"<think>\n{thought}\n</think>\n\ngo north"
        turn = chat.read(chat.assistant_tokens(message))
        assert (turn.action, turn.finished, turn.message) == ("go north", True, message.replace("<|end|>", "< |end|>"))
        assert turn.thought == thought.replace("<|end|>", "< |end|>")
    assert (
        chat.read(chat.assistant_tokens("go north")).action == chat.action_text(chat.assistant_tokens("go north")) == "go north"
    )
    assert chat.tokenizer.decode(chat.assistant_tokens("go north")) == ("\n</think>\n\n" if opens else "") + "go north<|end|>"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\ngo"}]
    encoded = chat.encode([*talk, {"role": "user", "content": "so"}])
    prompt = chat.prompt_tokens("hi")
    assert encoded.token_ids[: len(prompt)] == prompt
    text = chat.tokenizer.decode(encoded.token_ids)
    assert "why\n</think>\n\ngo<|end|>" in text, "earlier thoughts are kept even where the template drops them"
    starts = {QWEN: 1, R1: 2, CLOSED: 3}[template]
    assert (text.count("<think>"), text.count("</think>")) == (starts, starts - opens)


def test_observation_cannot_open_or_close_a_thought(marks: str) -> None:
    chat = Chat(tokenizer(QWEN, marks), MARKS)
    text = chat.tokenizer.decode([*chat.prompt_tokens("a <think> b"), *chat.observation_tokens("</think> c")])
    assert "< think> b" in text
    assert "< /think> c" in text


def test_without_thinking_the_whole_turn_is_the_action(marks: str) -> None:
    chat = Chat(tokenizer(QWEN, marks))
    ids = [*chat.tokenizer.encode("<think>a</think>b", add_special_tokens=False), chat.end_of_turn]
    assert chat.action_text(ids) == ("ab" if marks == "special" else "<think>a</think>b")
    assert chat.read(ids).finished


class ScriptedEngine:
    """An engine that returns given texts in order; a text ending in `|` is cut by max_tokens, one in `||` by the context."""

    def __init__(self, texts: list[str], chat: Chat) -> None:
        self.texts, self.chat = list(texts), chat
        self.asked: list[int] = []
        self.opened = 0
        self.fed: list[int] = []

    def open(self, token_ids, prefix=None):
        self.opened += 1
        return self.opened

    def extend(self, session, token_ids):
        self.fed += token_ids

    def request(self, session, key, sampling):
        self.asked.append(session)

    def advance(self):
        asked, self.asked = sorted(self.asked), []
        return [self.turn(session) for session in asked]

    def turn(self, session: int) -> Turn:
        text = self.texts.pop(0)
        cut = {0: "stop", 1: "length", 2: "context"}[len(text) - len(text.rstrip("|"))]
        ids = self.chat.tokenizer.encode(text.rstrip("|"), add_special_tokens=False)
        ids = [*ids, self.chat.end_of_turn] if cut == "stop" else ids
        return Turn(session, tuple(ids), (-0.5,) * len(ids), cut, (0.0,) * len(ids))

    def fork(self, session, count):
        return [self.open(()) for _ in range(count)]

    def snapshot(self, session, length=None):
        return None

    def close(self, session): ...


class RejectsEmptyActions(CountingEnvironment):
    """Rejects empty actions, as real environments do."""

    def step(self, action):
        step = super().step(action)
        return step if action else SimpleNamespace(**{**vars(step), "accepted": False, "done": step.done})


def played(chat: Chat, texts: list[str], turns: int, count: int = 1, max_length: int = 400, **options):
    engine = ScriptedEngine(texts, chat)
    tasks = toy_tasks(turns, turns=turns, ends=False)[-1:]
    with EnvironmentPool(RejectsEmptyActions) as pool:
        requests = attempts(tasks, count)
        episodes = collect(
            engine, chat, pool, requests, Sampling(max_tokens=64), Labels(0), max_length=max_length, threaded=False, **options
        )
    return episodes, engine


@pytest.mark.parametrize("template", [QWEN, R1])
def test_rollout_plays_only_the_action_and_records_all_tokens(template: str, marks: str) -> None:
    """Contract: the environment gets the action without its thought; every drawn token is recorded as the policy's with its
    log-probability; messages keep the thought; nothing is tokenised again."""
    chat = Chat(tokenizer(template, marks), MARKS)
    opens = template == R1
    drawn = ["<think>\nwhich?\n</think>\n\ntake key", "open box", "<think>\nno end|"]
    drawn = [text.removeprefix("<think>\n") if opens else text for text in drawn]
    (episode,), _ = played(chat, drawn, 3)
    assert [turn.action for turn in episode.turns] == ["take key", "" if opens else "open box", ""]
    assert [turn.action_key for turn in episode.turns] == [turn.action for turn in episode.turns]
    assert [turn.accepted for turn in episode.turns] == [True, not opens, False]
    for turn, text in zip(episode.turns, drawn, strict=True):
        ids = chat.tokenizer.encode(text.rstrip("|"), add_special_tokens=False)
        ids += [] if text.endswith("|") else [chat.end_of_turn]
        assert episode.token_ids[turn.start : turn.end] == ids
        assert set(episode.owner[turn.start : turn.end]) == {int(Owner.POLICY)}
        assert set(episode.logprob[turn.start : turn.end]) == {-0.5}
    replies = [message["content"] for message in episode.messages if message["role"] == "assistant"]
    assert replies[0] == "<think>\nwhich?\n</think>\n\ntake key"
    assert replies == [message["content"] for message in conversation(episode)[1::2]]
    assert (episode.stop_reason, episode.truncated) == ("thinking", True)
    assert "thinking" in OVERLONG


@pytest.mark.parametrize(
    ("texts", "turns", "reason"),
    [
        (["<think>a|", "<think>b</think>go"], 2, "turn_limit"),  # cut once, finished later
        (["<think>a"], 1, "turn_limit"),  # ended by the end-of-turn token
        (["<think>a</think>go|"], 1, "turn_limit"),  # cut within the action
        (["go|"], 1, "turn_limit"),
        (["<think>a|"], 1, "thinking"),
        (["<think>a||"], 2, "thinking"),
        (["go||"], 2, "length"),
    ],
)
def test_unfinished_thought_has_its_own_stop_reason(texts: list[str], turns: int, reason: str) -> None:
    (episode,), _ = played(Chat(tokenizer(QWEN, "token"), MARKS), texts, turns)
    assert episode.stop_reason == reason
    assert [turn.action == "" for turn in episode.turns] == ["</think>" not in text and "go" not in text for text in texts]


def test_branch_inherits_messages_with_thoughts() -> None:
    class Once:
        """Forks the only row after its first turn."""

        candidates = 1

        def initial(self, size: int) -> int:
            return 1

        def grow(self, paths, places, *key):
            return [Fork(0, 1)] if places and len(paths) == 1 and paths[0].moved else []

    chat = Chat(tokenizer(QWEN, "token"), MARKS)
    episodes, _ = played(chat, ["<think>a</think>go", "<think>b</think>x", "<think>c</think>y"], 2, 2, plan=Once())
    branch = next(episode for episode in episodes if episode.parent)
    first = next(episode for episode in episodes if not episode.parent)
    assert branch.messages[:3] == first.messages[:3]
    assert branch.messages[1]["content"] == "<think>a</think>go"
    assert branch.messages[3] != first.messages[3]
    assert [turn.action for turn in branch.turns] == ["go", "y"]


def test_equal_actions_after_different_thoughts_count_as_one() -> None:
    chat = Chat(tokenizer(QWEN, "token"), MARKS)
    engine = ScriptedEngine(["<think>a</think>go", "stay", "<think>b</think>go"], chat)
    turns = [engine.turn(session) for session in range(3)]
    assert choose([], turns[1:], None, lambda ids: chat.action_text(ids)) == 0
    assert choose([], turns, None, lambda ids: chat.action_text(ids)) == 0
    assert choose([], [turns[1], turns[0], turns[2]], None, lambda ids: chat.action_text(ids)) == 1


def test_tree_nodes_hold_actions_without_thoughts(tiny_policy: Path) -> None:
    """Contract: in tree search, too, the environment gets only the action. The markers are letters that a random policy draws
    often."""
    policy = load_policy(tiny_policy)
    chat = Chat(policy.tokenizer, Thinking(start="o", end="e"))
    engine = TorchEngine(policy.model, [chat.end_of_turn], 16, 200)
    with EnvironmentPool(CountingEnvironment) as pool:
        trees = Search(engine, chat, pool, Annotate(iterations=8, expand_k=3), 0, 200).grow(toy_tasks(4, turns=2))
    nodes = [node for tree in trees for node in tree.nodes[1:]]
    texts = [policy.tokenizer.decode(node.edge.token_ids, skip_special_tokens=True).strip() for node in nodes]
    assert [node.edge.action for node in nodes] == [parse_turn(text, chat.thinking).action for text in texts]
    assert sum("e" in text and bool(node.edge.action) for text, node in zip(texts, nodes, strict=True)) > 3
    assert all(len(node.edge.token_ids) == len(node.edge.logprobs) for node in nodes)


def test_every_stage_passes_model_thinking_to_chat() -> None:
    """Contract: whoever makes a chat for the run's policy passes `model.thinking`; without thoughts are pretraining, small models
    for narrow calls, an imported file, whose end of a turn is looked up, and a judge, an adviser or a model that is asked for a
    choice, which answer by the probabilities of their options."""
    missing = []
    for path in sorted((ROOT / "stages").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = {
            name.asname or name.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function, where = ast.unparse(call.func), path.relative_to(ROOT).as_posix()
            arguments = len(call.args) + len(call.keywords)
            if function == "Chat" and imports.get("Chat") == "stages.agent.chat" and arguments < 2:
                missing.append(where)
            if function == "EngineSettings.of" and arguments < 3:
                missing.append(where)
    assert missing == [
        "stages/control/advice/language_model.py",
        *["stages/conversion/specialise.py"] * 2,
        "stages/exchange/gguf.py",
        "stages/judging/chooser.py",
        "stages/judging/generative.py",
        "stages/judging/local.py",
        "stages/pretraining/__main__.py",
        "stages/serving/specialists.py",
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"start": ""}, "start must be a marker without surrounding white space"),
        ({"end": "</think>\n"}, "end must be a marker without surrounding white space"),
        ({"start": "#", "end": "##"}, "neither of start and end may contain the other"),
        ({"strat": "<think>"}, "unknown key 'model.thinking.strat'. Did you mean 'start'"),
        (True, r"model\.thinking"),
    ],
)
def test_invalid_markers_are_rejected(value: object, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        parse_params({"domains": ["search"], "per_domain": {"search": {}}, "model": {"thinking": value}})


def test_thinking_is_off_by_default() -> None:
    assert parse_params({"domains": ["search"], "per_domain": {"search": {}}}).model.thinking is None
    made = parse_params({"domains": ["search"], "per_domain": {"search": {}}, "model": {"thinking": {}}}).model.thinking
    assert made == Thinking(start="<think>", end="</think>")
    assert TINY_TEMPLATE.count("think") == 0
