"""Teams: who reads what, and plays that do not depend on what runs beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from toy_environment import CountingEnvironment, toy_tasks

from stages.agent.constrained_engine import constrained
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.rollout import Labels, attempts, collect
from stages.agent.team import Member, member_folder, read_team, write_team
from stages.agent.team_play import collect_team
from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine
from stages.environments.registry import load_domain
from stages.records.episode import Episode, Owner

SAMPLING, LABELS = Sampling(max_tokens=6), Labels(3, "weights", "params")
PAIR = [Member(role="planner", prompt="planner.txt"), Member(role="solver", sees=["planner"])]


def play(policy, chat, team: Sequence[Member], count: int = 4, width: int = 8, length: int = 200, **limits) -> list[Episode]:
    engines = {member.role: TorchEngine(policy.model, [chat.end_of_turn], 8, length) for member in team}
    with EnvironmentPool(CountingEnvironment) as pool:
        requests = attempts(toy_tasks(count), 2)
        parts = (engines, chat, pool, requests, team, SAMPLING, LABELS)
        found = collect_team(*parts, max_length=length, width=width, **limits)
    assert not any(engine._sessions for engine in engines.values())
    return found


@pytest.fixture(scope="module")
def plays(policy, chat) -> dict[str, dict[str, Episode]]:
    """Of planner and solver: play -> role -> episode."""
    found: dict[str, dict[str, Episode]] = {}
    for episode in play(policy, chat, PAIR):
        found.setdefault(episode.play, {})[episode.role] = episode
    return found


def test_a_team_of_one_plays_as_a_single_agent(policy, chat) -> None:
    """Contract: token for token, whatever the limits: the environment's, of turns, and of tokens."""
    for length, turns in ((200, None), (200, 2), (64, None)):
        engine = TorchEngine(policy.model, [chat.end_of_turn], 8, length)
        with EnvironmentPool(CountingEnvironment) as pool:
            parts = (engine, chat, pool, attempts(toy_tasks(6), 2, role="solver"), SAMPLING, LABELS)
            alone = collect(*parts, max_length=length, max_turns=turns)
        assert play(policy, chat, [Member(role="solver")], 6, length=length, max_turns=turns) == alone
        assert {episode.stop_reason for episode in alone} & {"terminated", "turn_limit", "context"}


def test_a_member_reads_what_it_sees_and_nothing_else(plays, chat) -> None:
    """The solver reads the plan after the task and after each observation; the planner, who sees nobody, the task and the
    observations. Tokens are those of the messages."""
    assert len(plays) == 8
    for name, roles in plays.items():
        planner, solver = roles["planner"], roles["solver"]
        assert (solver.episode_id, planner.episode_id) == (name, f"{name}/planner")
        assert planner.group_id == solver.group_id
        seen = [message["content"] for message in solver.messages if message["role"] == "user"]
        read = [message["content"] for message in planner.messages if message["role"] == "user"]
        assert read[0].startswith("take the key\nPlan the next action.")
        for turn, plan in enumerate(planner.turns):
            world = "take the key\nyou are in room" if turn == 0 else ""
            assert seen[turn].startswith(world)
            assert seen[turn].endswith(f"planner: {plan.action}")
        assert not any("planner:" in text or "solver:" in text for text in read)
        assert [text.partition("\nplanner:")[0] for text in seen[1:]] == read[1 : len(seen)]
        assert sum(turn.reward for turn in planner.turns) == planner.reward == 0.0
        for episode in (planner, solver):
            encoded = chat.encode([message for message in episode.messages if message["role"] == "user"][:1])
            assert episode.token_ids[: len(encoded.token_ids)] == encoded.token_ids
            assert len(episode.token_ids) == len(episode.owner) == len(episode.logprob) == len(episode.turn)
            spans = [(turn.start, turn.end) for turn in episode.turns]
            written = [place for place, owner in enumerate(episode.owner) if owner == Owner.POLICY]
            assert written == [place for start, end in spans for place in range(start, end)]


def test_moves_are_the_order_of_the_plays_turns(plays) -> None:
    for roles in plays.values():
        count = len(roles["solver"].turns)
        assert roles["planner"].moves == list(range(0, 2 * count, 2))
        assert roles["solver"].moves == list(range(1, 2 * count, 2))
        assert roles["planner"].stop_reason == roles["solver"].stop_reason == "terminated"
    assert {len(roles["solver"].turns) for roles in plays.values()} == {1, 2, 3}


def test_plays_do_not_depend_on_each_other(policy, chat, plays) -> None:
    """Contract: the same plays, three at once."""
    assert play(policy, chat, PAIR, width=3) == sorted(
        (episode for roles in plays.values() for episode in roles.values()), key=lambda episode: episode.episode_id
    )


def test_without_dependence_no_prompt_holds_anothers_text(policy, chat) -> None:
    team = [Member(role="planner"), Member(role="critic", speaks="first"), Member(role="solver")]
    found = play(policy, chat, team)
    texts = [message["content"] for episode in found for message in episode.messages if message["role"] == "user"]
    assert texts
    assert not any(f"{member.role}:" in text for text in texts for member in team)
    by_role = {member.role: [episode for episode in found if episode.role == member.role] for member in team}
    assert all(len(episode.turns) == 1 for episode in by_role["critic"])
    assert max(len(episode.turns) for episode in by_role["planner"]) == 3
    assert next(episode.moves for episode in by_role["solver"])[0] == 2


def test_a_member_may_read_earlier_actions_and_falls_silent_without_room(policy, chat) -> None:
    """A planner who sees the solver reads its last action; its context is full before the solver's, who then plays on alone."""
    team = [Member(role="planner", sees=["solver"], prompt="planner.txt"), Member(role="solver")]
    found = play(policy, chat, team, length=72)
    planners = [episode for episode in found if episode.role == "planner"]
    solvers = {episode.play: episode for episode in found if episode.role == "solver"}
    later = [episode for episode in planners if len(episode.turns) > 1]
    for episode in later:
        assert episode.messages[2]["content"].startswith(f"solver: {solvers[episode.play].turns[0].action}")
    full = [episode for episode in planners if episode.stop_reason == "context"]
    assert full
    assert all(len(solvers[episode.play].turns) > len(episode.turns) for episode in full)


def test_a_constraint_binds_the_acting_member_and_is_recorded(policy, chat, tmp_path) -> None:
    """Contract: the reward terms of a team's episodes are those of a single agent's: all conform, and `removed_nats` has what the
    mask took; a team of one plays as a single agent."""
    domain = load_domain("search", {"constraint": {"spec": "search_then_answer", "max_state_tokens": 4}, "max_turns": 4})
    tasks = domain.build(list(domain.recipes(2, 0))[:2], tmp_path, 1)
    found = {}
    for roles in (["solver"], ["planner", "solver"], []):
        team = [Member(role=role) for role in roles]
        plain = {role: TorchEngine(policy.model, [chat.end_of_turn], 8, 400) for role in roles or ["solver"]}
        engines = {**plain, "solver": constrained(plain["solver"], chat, domain, "rl", 400)}
        with EnvironmentPool(lambda: domain.make(tmp_path)) as pool:
            requests = attempts(tasks, 2, role="solver")
            if team:
                found[len(roles)] = collect_team(engines, chat, pool, requests, team, SAMPLING, LABELS, max_length=400)
            else:
                found[0] = collect(engines["solver"], chat, pool, requests, SAMPLING, LABELS, max_length=400)
    assert found[1] == found[0]
    for episode in found[2]:
        terms = episode.reward_terms
        assert (terms["removed_nats"] > 0 and terms["violations"] == 0) if episode.role == "solver" else not terms


def test_the_file_of_a_team_round_trips(tmp_path) -> None:
    write_team(tmp_path, "toy", True, PAIR)
    team = read_team(tmp_path, "toy")
    assert team is not None
    assert [member.template for member in team.members] == [PAIR[0].template, "{task}"]
    assert member_folder(tmp_path, team, "planner") == tmp_path / "agents" / "planner"
    assert member_folder(tmp_path, team, "solver") == tmp_path
    assert read_team(tmp_path, "search") is None
    (tmp_path / "team.json").write_text('{"domain": 3}')
    with pytest.raises(ValueError, match=r"(?s)describes no team .*domain.*; run rl@toy again"):
        read_team(tmp_path, "toy")
