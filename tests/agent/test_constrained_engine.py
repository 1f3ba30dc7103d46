"""Constraints on turns: what masks allow, and that every turn of a random policy obeys them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from constraints.spec_files import spec_file

from stages.agent.chat import Chat
from stages.agent.constrained_engine import ConstrainedEngine, constrained
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.logprobs import only_kept, token_logprobs
from stages.agent.policy import load_policy
from stages.agent.rollout import Labels, attempts, collect
from stages.agent.turn_masks import SpecMask, SpecTexts
from stages.agent.turn_vocabulary import TurnVocabulary
from stages.algorithms.batch import Written
from stages.constraints.conformance import conformance
from stages.constraints.settings import Constraint
from stages.constraints.transcript import Transcripts
from stages.engine import masks as engine_masks
from stages.engine.engine import EngineError, Sampling
from stages.engine.masks import compact, masked
from stages.engine.model_engine import ModelEngine
from stages.engine.torch_engine import TorchEngine
from stages.environments.registry import load_domain
from stages.records.episode import Episode, Owner, episode_row
from stages.training.common.batches import trajectory_batch
from stages.training.common.kept import kept_of

REACT = {"kind": "ltl", "spec": "react", "values": {"action": ["search", "searchall"]}, "max_state_tokens": 12}
SAMPLING = Sampling(temperature=1.2, max_tokens=110, kept=True)
LENGTH = 1000


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Any:
    return load_policy(tiny_policy)


@pytest.fixture(scope="module")
def chat(policy: Any) -> Chat:
    return Chat(policy.tokenizer)


def play(
    policy: Any,
    chat: Chat,
    folder: Path,
    sampling: Sampling = SAMPLING,
    count: int = 4,
    engine: type = TorchEngine,
    **values: Any,
) -> tuple[list[Episode], Any, Any]:
    """Episodes of a random policy on search under a constraint, with the domain and the engine."""
    domain = load_domain("search", {"constraint": values, "max_turns": 4})
    tasks = domain.build(list(domain.recipes(2, 0))[:2], folder, 1)
    slots = (count,) if engine is TorchEngine else ()
    inner = engine(policy.model, [chat.end_of_turn], *slots, LENGTH)
    wrapped = constrained(inner, chat, domain, "rollout", LENGTH)
    with EnvironmentPool(lambda: domain.make(folder)) as pool:
        requests = attempts(tasks, count // 2)
        episodes = collect(wrapped, chat, pool, requests, sampling, Labels(3), max_length=LENGTH, threaded=False)
    return episodes, domain, wrapped


@pytest.fixture(scope="module")
def react(policy: Any, chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Episode], Any, Any]:
    return play(policy, chat, tmp_path_factory.mktemp("react"), **REACT)


def measured(episodes: list[Episode], domain: Any) -> dict[str, Any]:
    return conformance(domain.constraint.rules, [episode_row(episode) for episode in episodes])


def test_masked_softmax():
    """logits (2, 1, 0), allowed the second and third: (0, 0.7311, 0.2689); mass removed 0.6652, cost 1.0943 nats."""

    class Mask:
        renormalise = True

        def allowed(self) -> np.ndarray:
            return np.array([False, True, True])

        def append(self, token: int) -> None: ...

    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    result, left, forced = masked(logits, [Mask(), None], torch.tensor([1.0, 1.0]).double())
    torch.testing.assert_close(result[0].softmax(-1), torch.tensor([0.0, 0.7311, 0.2689]), atol=1e-4, rtol=0)
    torch.testing.assert_close(result[1], logits[1])
    assert 1 - math.exp(float(left[0])) == pytest.approx(0.6652, abs=1e-4)
    # -log 0.3348 is 1.0943 with the removed mass of 0.6652 rounded; unrounded it is 1.0944.
    assert float(-left[0]) == pytest.approx(1.0944, abs=1e-4)
    assert (float(left[1]), forced.tolist()) == (0.0, [False, False])


def test_rows_are_masked_alike_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mask:
        renormalise = True

        def __init__(self, tokens: list[int]) -> None:
            self.tokens = tokens

        def allowed(self) -> np.ndarray:
            return np.isin(np.arange(9), self.tokens)

        def append(self, token: int) -> None: ...

    logits = torch.linspace(-3, 3, 45).sin().reshape(5, 9)
    masks = [Mask([1, 2]), None, Mask([3]), Mask([0, 4, 8]), Mask([7, 5])]
    temperature = torch.tensor([1.0, 1.0, 0.5, 0.0, 2.0]).double()
    whole = masked(logits, masks, temperature)
    monkeypatch.setattr(engine_masks, "BLOCK", 18)
    parts = masked(logits, masks, temperature)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
    assert whole[2].tolist() == parts[2].tolist() == [False, False, True, False, False]
    for row, mask in enumerate(masks):
        kept = set(range(9)) if mask is None else set(mask.tokens)
        assert set(torch.isfinite(parts[0][row]).nonzero().flatten().tolist()) == kept


def test_masks_of_more_tokens_than_the_model_has():
    """Contract: tokens without a row in the model are never drawn; Gemma 3's tokenizer has one more than the model."""

    class Mask:
        renormalise = True

        def allowed(self) -> np.ndarray:
            return np.array([False, True, False, True])

        def append(self, token: int) -> None: ...

    result, _, forced = masked(torch.zeros(1, 3), [Mask()], torch.ones(1).double())
    assert (result[0].isfinite().tolist(), forced.tolist()) == ([False, True, False], [True])


def test_kept_sets_as_what_they_leave_out():
    few, many = np.array([1, 3], dtype=np.int32), np.array([0, 1, 2, 4, 5], dtype=np.int32)
    assert compact(few, 6).tolist() == [1, 3]
    assert compact(many, 6).tolist() == [-5]
    assert compact(np.arange(6, dtype=np.int32), 6).tolist() == []
    kept = torch.tensor([[1, 3], [-5, -1], [-1, -1]], dtype=torch.int32)
    allowed = only_kept(torch.zeros(3, 6), kept) == 0
    assert [row.nonzero()[:, 0].tolist() for row in allowed] == [[1, 3], [0, 1, 2, 4, 5], [0, 1, 2, 3, 4, 5]]


def mask_of(chat: Chat, room: int = 110, turns: float = math.inf, **values: Any) -> SpecMask:
    constraint = Constraint.model_validate({**REACT, **values})
    rules = constraint.rules
    assert isinstance(rules, Transcripts)
    return SpecMask(SpecTexts(rules, TurnVocabulary(chat)), constraint, rules.start, room, turns)


def write(mask: SpecMask, text: str, chat: Chat) -> None:
    """Append `text`, by its tokens within a turn, each of which must be allowed."""
    for token in TurnVocabulary(chat).within(text):
        allowed = mask.allowed()
        assert allowed is None or allowed[token], repr(chat.tokenizer.decode([token]))
        mask.append(token)


def choose(mask: SpecMask, state: str) -> None:
    """Take the option that begins `state`."""
    assert mask.choice is not None
    option = next(option for option in mask.choice if option.state == state)
    for token in option.tokens[mask.taken :]:
        mask.append(token)


def test_an_entry_that_others_continue_can_end(chat: Chat):
    """Contract: "search" and "searchall" are both reachable, by the model's own probabilities where they part."""
    mask = mask_of(chat)
    choose(mask, "thought")
    write(mask, " x\n[Action]", chat)
    vocabulary = TurnVocabulary(chat)
    write(mask, " search", chat)
    allowed = mask.allowed()
    assert allowed is not None
    following = {vocabulary.within(" searchall")[len(vocabulary.within(" search"))], vocabulary.within("\n[Input]")[0]}
    assert set(np.flatnonzero(allowed)) == following
    write(mask, "all", chat)
    assert int(mask.allowed().sum()) == 1  # type: ignore[union-attr]
    write(mask, "\n[Input] x", chat)
    assert mask.state is not None
    assert mask.state.name == "action_input"


def test_markers_of_other_states_and_the_end_are_not_allowed(chat: Chat):
    mask = mask_of(chat, max_state_tokens=64)
    choose(mask, "thought")
    write(mask, " [Answer", chat)
    allowed, texts = mask.allowed(), TurnVocabulary(chat).texts
    assert allowed is not None
    assert not allowed[chat.end_of_turn]
    assert not any(allowed[token] for token, text in enumerate(texts) if text.startswith("]"))
    assert allowed[texts.index("x")]
    write(mask, "x [Action", chat)
    assert mask.allowed()[texts.index("]")]  # type: ignore[index]


def test_budgets_force_the_shortest_way_to_the_end(chat: Chat):
    mask = mask_of(chat, turns=1)
    assert [option.state for option in mask.choice or []] == ["final_thought"]
    free = mask_of(chat, turns=1, budget_exit="truncate")
    assert {option.state for option in free.choice or []} == {"final_thought", "thought"}
    tokens = 0
    rng = np.random.default_rng(0)
    mask = mask_of(chat, room=60)
    while not mask.finished:
        allowed = mask.allowed()
        assert allowed is not None
        mask.append(int(rng.choice(np.flatnonzero(allowed))))
        tokens += 1
    assert tokens <= 60
    assert mask.texts.rules.may_end(mask.position)


def test_every_episode_of_a_random_policy_obeys(react: tuple[list[Episode], Any, Any]):
    episodes, domain, engine = react
    found = measured(episodes, domain)
    assert (found["conformance"], found["violations"]) == (1.0, {})
    assert {episode.reward_terms["violations"] for episode in episodes} == {0.0}
    assert {episode.reward_terms["fulfilled"] for episode in episodes} == {1.0}
    assert {episode.stop_reason for episode in episodes} == {"terminated"}
    assert engine.counters["forced_tokens"] == sum(episode.owner.count(Owner.FORCED) for episode in episodes) > 100
    assert sum(episode.reward_terms["removed_nats"] for episode in episodes) > 0


def test_commands_of_a_plan_count_as_turns_of_the_environment(policy: Any, chat: Chat, tmp_path: Path):
    """Contract: where turns run short, episodes still reach the end of the formula, also if a turn takes several of them."""
    episodes, domain, engine = play(policy, chat, tmp_path, count=8, spec="pass", max_state_tokens=3)
    sent = [[len(domain.constraint.rules.commands(turn.action)) for turn in episode.turns] for episode in episodes]
    assert any(max(commands) > 1 for commands in sent)
    assert all(sum(commands) <= 4 for commands in sent)
    assert {(episode.stop_reason, episode.reward_terms["fulfilled"]) for episode in episodes} == {("terminated", 1.0)}
    text = "[Plan] x\n[Action] a\n[Action] b"
    for turns, following in ((3, {""}), (4, {"action", ""})):  # two are for the actions, and one for the answer
        mask = engine._resumed(engine.rules.start, 110, turns, text, one_choice=True)
        assert {option.state for option in mask.choice} == following
    session = engine.open([*chat.prompt_tokens("q"), *chat.assistant_tokens(text), *chat.observation_tokens("r")])
    engine._follow(engine._sessions[session])
    assert engine._sessions[session].turns == 2


def test_a_formula_begins_anew_where_the_environment_has_it(
    policy: Any, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Contract: the position in the formula is the environment's, also where a fulfilled formula could go on."""
    text = (
        '(states (q env) (plan "plan" turn) (noted env) (search "search" turn) (r env))'
        "(behaviour (next q plan noted (always_0_3 (next search r))))"
    )
    values: dict[str, Any] = {"spec": spec_file(tmp_path, text, monkeypatch), "terminate_on_restart": False}
    episodes, domain, _ = play(policy, chat, tmp_path, Sampling(max_tokens=8, kept=True), count=2, **values)
    assert measured(episodes, domain)["conformance"] == 1.0
    assert {len(episode.turns) for episode in episodes} == {4}
    assert all(turn.action.startswith("plan") for episode in episodes for turn in episode.turns)
    assert {episode.reward_terms["violations"] for episode in episodes} == {0.0}


def test_report_only_changes_nothing_but_the_terms(policy: Any, chat: Chat, tmp_path: Path):
    """Contract: with report_only, the conformance is that of the policy without a constraint."""
    episodes, domain, engine = play(policy, chat, tmp_path, Sampling(max_tokens=8), **{**REACT, "enforcement": "report_only"})
    assert isinstance(engine, TorchEngine)
    assert measured(episodes, domain)["conformance"] == 0.0
    assert {episode.reward_terms["violations"] for episode in episodes} == {1.0}
    free = load_domain("search", {"max_turns": 4})
    with EnvironmentPool(lambda: free.make(tmp_path)) as pool:
        tasks = free.build(list(free.recipes(2, 0))[:2], tmp_path, 1)
        plain = collect(
            *(engine, chat, pool, attempts(tasks, 2), Sampling(max_tokens=8), Labels(3)), max_length=LENGTH, threaded=False
        )
    assert [episode.token_ids for episode in plain] == [episode.token_ids for episode in episodes]


def test_training_renormalises_over_what_was_allowed_and_leaves_forced_tokens_out(
    policy: Any, react: tuple[list[Episode], Any, Any]
):
    """Contract: with the same weights, masked log-probabilities of the training pass are those of the draw, to 1e-5."""
    episodes, _, _ = react
    batch = trajectory_batch(episodes)
    written = batch.get(Written)
    assert written is not None
    assert batch.mask.equal(written.owner == int(Owner.POLICY))
    kept = kept_of(batch)
    assert kept is not None
    with torch.no_grad():
        found = token_logprobs(policy.model, batch.token_ids, batch.mask, SAMPLING.temperature, kept=kept)
    torch.testing.assert_close(found, batch.logprobs_old, atol=1e-5, rtol=0)


def test_without_renormalisation_log_probabilities_are_the_policys(policy: Any, chat: Chat, tmp_path: Path):
    episodes, _, _ = play(policy, chat, tmp_path, count=2, **{**REACT, "renormalise": False})
    batch = trajectory_batch(episodes)
    assert kept_of(batch) is None
    assert not any(Owner.FORCED in episode.owner for episode in episodes)
    with torch.no_grad():
        found = token_logprobs(policy.model, batch.token_ids, batch.mask, SAMPLING.temperature)
    torch.testing.assert_close(found, batch.logprobs_old, atol=1e-5, rtol=0)


def test_rollback_takes_back_what_violates_and_retry_draws_anew(policy: Any, chat: Chat, tmp_path: Path):
    values: dict[str, Any] = {**REACT, "enforcement": "rollback", "apply": ["rollout"]}
    episodes, domain, engine = play(policy, chat, tmp_path / "rollback", count=2, **values)
    assert measured(episodes, domain)["conformance"] == 1.0
    assert engine.counts["redrawn_turns"] > 0
    verbs: dict[str, Any] = {"spec": "search_then_answer", "enforcement": "retry", "retries": 2, "apply": ["rollout"]}
    episodes, domain, engine = play(policy, chat, tmp_path / "retry", Sampling(max_tokens=4), count=2, **verbs)
    assert measured(episodes, domain)["conformance"] == 0.0  # a random policy does not write "search" in two draws
    assert engine.counts["redrawn_turns"] == len(episodes)  # the first turn of each; what follows is not judged


def test_the_engine_of_other_models_masks_alike(policy: Any, chat: Chat, tmp_path: Path):
    values: dict[str, Any] = {"spec": "search_then_answer"}
    ours, _, _ = play(policy, chat, tmp_path, Sampling(max_tokens=6, kept=True), count=2, **values)
    own, _, _ = play(policy, chat, tmp_path, Sampling(max_tokens=6, kept=True), count=2, engine=ModelEngine, **values)
    assert [(one.token_ids, one.owner, one.kept) for one in own] == [(one.token_ids, one.owner, one.kept) for one in ours]


def test_copies_and_histories_continue_at_their_place(policy: Any, chat: Chat, react: tuple[list[Episode], Any, Any]):
    """Contract: a session opened with a conversation's tokens stands where the one that played it stood."""
    episodes, _, _ = react
    episode = max(episodes, key=lambda one: len(one.turns))
    assert len(episode.turns) > 1
    start = episode.turns[1].start
    engine = ConstrainedEngine(
        TorchEngine(policy.model, [chat.end_of_turn], 4, LENGTH), chat, Constraint.model_validate(REACT), LENGTH, 4
    )
    whole = engine.open(episode.token_ids[:start])
    first = engine.open(episode.token_ids[: episode.turns[0].start])
    copied = engine.open(episode.token_ids[episode.turns[0].start : start], engine.snapshot(first))
    for session in (whole, copied):
        engine.request(session, 7, SAMPLING)
    turns = {turn.session: turn for turn in engine.advance()}
    while len(turns) < 2:
        turns |= {turn.session: turn for turn in engine.advance()}
    assert turns[whole].token_ids == turns[copied].token_ids
    assert engine._sessions[whole].turns == engine._sessions[copied].turns == 1
    engine.reset()


def test_other_back_ends_are_refused_by_name(chat: Chat):
    domain = load_domain("search", {"constraint": REACT})
    with pytest.raises(EngineError, match=r"per_domain\.search\.environment\.constraint\.enforcement: mask masks tokens"):
        constrained(object(), chat, domain, "rollout", LENGTH)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["regex", "json_schema", "grammar"])
def test_grammars_hold_by_construction(kind: str, policy: Any, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"tool": {"enum": ["search", "answer"]}}, "required": ["tool"]}
    specs = {
        "regex": "(search|answer) [a-z]{1,9}",
        "json_schema": json.dumps({**schema, "additionalProperties": False}),
        "grammar": 'start: verb " " NAME\nverb: "search" | "answer"\nNAME: /[a-z]{1,9}/',
    }
    spec = specs[kind]
    if kind != "regex":
        spec = spec_file(tmp_path, spec, monkeypatch, "spec")
    episodes, domain, _ = play(policy, chat, tmp_path, Sampling(max_tokens=60, kept=True), count=2, kind=kind, spec=spec)
    assert measured(episodes, domain)["conformance"] == 1.0
    if kind == "json_schema":
        assert json.loads(episodes[0].turns[0].action)["tool"] in ("search", "answer")
