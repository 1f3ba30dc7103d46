"""Branching rollouts: episodes do not depend on timing, and a branch continues from its parent's exact state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from toy_environment import CountingEnvironment, toy_tasks

from stages.agent.branching import Fork, Path
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.logprobs import score_tokens, token_logprobs
from stages.agent.rollout import Labels, attempts, collect
from stages.agent.shared_prefixes import make_layout
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import StepKeys
from stages.algorithms.parts.branching import EntropyPlan
from stages.algorithms.settings import Rl
from stages.engine.engine import Sampling
from stages.engine.sampling import candidate_entropy
from stages.engine.torch_engine import TorchEngine
from stages.records.episode import Episode, Owner
from stages.training.common.batches import trajectory_batch

SIZE = 6


def plan_of(policy, **branching):
    values = {"algorithm": "arpo", "group_size": SIZE, "branching": {"initial": 3, **branching}}
    return resolve(Rl.model_validate(values)).plan(policy.model.config.vocab_size)


class StepCounter(CountingEnvironment):
    """Counts the actions that are executed."""

    done = 0

    def step(self, action):
        StepCounter.done += 1
        return super().step(action)


def run(policy, chat, plan, tasks=None, *, size=SIZE, slots=16, width=16, max_length=200, make=CountingEnvironment, **kwargs):
    engine = TorchEngine(policy.model, [chat.end_of_turn], slots, max_length)
    tasks = toy_tasks(4, turns=4) if tasks is None else tasks
    with EnvironmentPool(make) as pool:
        played = (engine, chat, pool, attempts(tasks, size), Sampling(max_tokens=6), Labels(3, policy.hash, "params"))
        episodes = collect(*played, max_length=max_length, width=width, plan=plan, **kwargs)
    assert not engine._sessions
    return episodes, engine


@pytest.fixture(scope="module", params=["answer", "call"])
def branched(request, policy, chat):
    plan = plan_of(policy, probe=request.param)
    StepCounter.done = 0
    return plan, *run(policy, chat, plan, make=StepCounter), StepCounter.done


def by_episode_id(episodes: list[Episode]) -> dict[str, Episode]:
    return {episode.episode_id: episode for episode in episodes}


def test_episodes_do_not_depend_on_width_threads_slots_or_other_groups(policy, chat, branched):
    """Contract: episodes depend only on the seed, not on width, threads, slots or other groups."""
    plan, episodes, _, _ = branched
    assert any(episode.parent for episode in episodes)
    assert run(policy, chat, plan, threaded=False, width=2)[0] == episodes
    assert run(policy, chat, plan, toy_tasks(4, turns=4)[::-1], slots=5, width=40)[0] == episodes
    alone = run(policy, chat, plan, toy_tasks(4, turns=4)[3:])[0]
    assert alone == [episode for episode in episodes if episode.task_id == alone[0].task_id]


def test_each_group_has_exactly_group_size_episodes(branched):
    _, episodes, _, _ = branched
    assert [episode.episode_id for episode in episodes] == [
        f"toy-{task:03d}/{row:04d}" for task in range(4) for row in range(SIZE)
    ]


def test_branch_inherits_tokens_and_turns_of_its_parent(policy, chat, branched):
    """Tokens, owners, log-probs and turns before the branch point equal the parent's; environment tokens are never the policy's;
    all log-probs equal those that training computes."""
    _, episodes, _, _ = branched
    by_id = by_episode_id(episodes)
    for episode in episodes:
        mask = torch.tensor([episode.owner]) == int(Owner.POLICY)
        with torch.no_grad():
            trained = token_logprobs(policy.model, torch.tensor([episode.token_ids]), mask)
        torch.testing.assert_close(trained[0], torch.tensor(episode.logprob), atol=1e-5, rtol=0)
        assert episode.reward == sum(turn.reward for turn in episode.turns)
        assert [turn.state_key for turn in episode.turns] == [
            "|".join(turn.action for turn in episode.turns[:index]) for index in range(len(episode.turns))
        ]
        assert chat.encode_demonstration(episode.messages).turn[-1] == len(episode.turns) - 1
        if not episode.parent:
            assert episode.inherited == 0
            continue
        parent, start = by_id[episode.parent], episode.turns[episode.inherited].start
        assert 0 < episode.inherited < len(episode.turns)
        assert episode.token_ids[:start] == parent.token_ids[:start]
        assert episode.owner[:start] == parent.owner[:start]
        assert episode.logprob[:start] == parent.logprob[:start]
        assert episode.owner[start - 1] != int(Owner.POLICY)
        assert episode.owner[start] == int(Owner.POLICY)
        assert episode.turns[: episode.inherited] == parent.turns[: episode.inherited]


def test_shared_turns_are_played_once(branched):
    """The executed actions are those of turns that were not inherited, fewer than the turns of all episodes."""
    _, episodes, engine, done = branched
    played, turns = sum(len(episode.played) for episode in episodes), sum(len(episode.turns) for episode in episodes)
    assert done == played < turns
    own = sum(
        episode.policy_tokens - sum(turn.end - turn.start for turn in episode.turns[: episode.inherited]) for episode in episodes
    )
    assert engine.counters["sampled_tokens"] == own


def test_shared_prefixes_are_trained_once(branched):
    """Contract: in the shared-prefix layout a branch's tokens before the branch point are its parent's, and each shared draw has
    one number."""
    _, episodes, _, _ = branched
    group = [episode for episode in episodes if episode.task_id == "toy-003"]
    batch = trajectory_batch(group)
    layout, keys = make_layout(batch.token_ids, batch.mask), batch.get(StepKeys)
    places = {episode.episode_id: row for row, episode in enumerate(group)}
    for row, episode in enumerate(group):
        if episode.parent:
            start = episode.turns[episode.inherited].start
            assert torch.equal(layout.nodes[row, :start], layout.nodes[places[episode.parent], :start])
            assert torch.equal(keys.draws[row, : episode.inherited], keys.draws[places[episode.parent], : episode.inherited])
    drawn = keys.draws[keys.draws >= 0]
    assert drawn.unique().numel() == sum(len(episode.played) for episode in group) < drawn.numel()
    assert len(layout.ids) < sum(len(episode.token_ids) for episode in group)


def test_beam_of_one_equals_independent_sampling(policy, chat):
    """With beam 1 nothing branches, however many initial episodes there are."""
    plain = run(policy, chat, None)[0]
    assert run(policy, chat, plan_of(policy, beam=1, initial=SIZE))[0] == plain
    later = run(policy, chat, plan_of(policy, beam=1, initial=2))[0]
    assert later == plain


@dataclass
class ScriptedPlan:
    """A plan with given forks, one list per round."""

    rounds: list[list[Fork]]
    candidates: int = 0
    seen: list[list[Path]] = field(default_factory=list)

    def initial(self, size):
        return 1

    def grow(self, paths, free, *key):
        self.seen.append(list(paths))
        return self.rounds.pop(0) if self.rounds else []


def test_branches_of_branches_and_fresh_episodes_fill_the_group(policy, chat):
    """Row 1 branches from row 0 after its first answer, row 2 from row 1 at the same point; once all episodes are over, the
    remaining rows start afresh and the plan is not called again."""
    plan = ScriptedPlan([[Fork(0, 1)], [Fork(1, 1)]])
    task = toy_tasks(4, turns=4)[3:]
    episodes, _ = run(policy, chat, plan, task, size=5)
    plain, _ = run(policy, chat, None, task, size=5)
    shared = [("", 0), ("0000", 1), ("0001", 1), ("", 0), ("", 0)]
    assert [(episode.parent[-4:], episode.inherited) for episode in episodes] == shared
    assert episodes[0] == plain[0]
    assert episodes[3:] == plain[3:]
    assert max(len(paths) for paths in plan.seen) == 3
    batch = trajectory_batch(episodes)
    draws = batch.get(StepKeys).draws[:, 0].tolist()
    assert draws[:3] == [0, 0, 0]
    assert len({0, *draws[3:]}) == 3, "fresh episodes share no draw with others"
    assert [path.moved for path in plan.seen[1]] == [True, True]
    assert not any(path.alive for path in plan.seen[-1])


def test_turn_limit_applies_to_branches(policy, chat):
    """Contract: nothing branches after the last turn that the limit allows, and inherited turns count."""
    episodes, _ = run(policy, chat, plan_of(policy, base=1.0, initial=1, probe="call"), max_turns=2)
    assert len(episodes) == 4 * SIZE
    assert any(episode.parent for episode in episodes)
    assert all(len(episode.turns) <= 2 and episode.inherited < 2 for episode in episodes)
    assert any(episode.stop_reason == "turn_limit" and len(episode.turns) == 2 for episode in episodes)
    with pytest.raises(ValueError, match="the plan forks row"):
        run(policy, chat, ScriptedPlan([[Fork(0, 1)]]), toy_tasks(4, turns=4)[3:], size=4, max_turns=1)


@pytest.mark.parametrize("forks", [[Fork(0, 2)], [Fork(0, 0)], [Fork(0, 1)] * 4])
def test_invalid_fork_raises(policy, chat, forks):
    with pytest.raises(ValueError, match="the plan"):
        run(policy, chat, ScriptedPlan([forks]), toy_tasks(4, turns=4)[3:], size=4)


@pytest.mark.parametrize("threaded", [True, False])
def test_environment_error_propagates(policy, chat, threaded):
    class Broken(CountingEnvironment):
        def restore(self, state):
            raise OSError("the game crashed")

    with pytest.raises(OSError, match="the game crashed"):
        run(policy, chat, plan_of(policy, base=1.0), make=Broken, threaded=threaded)


def test_groups_are_filled_when_max_length_is_short(policy, chat):
    """Contract: neither a prompt that does not fit nor episodes that run out of tokens leave a group short."""
    for max_length in (13, 30, 40):
        episodes, _ = run(policy, chat, plan_of(policy, base=1.0), max_length=max_length)
        assert len(episodes) == 4 * SIZE
        assert all(len(episode.token_ids) <= max(max_length, 13) for episode in episodes)


def test_prefix_snapshot_draws_like_a_new_session(policy, chat):
    """Contract: a copy of a session's first tokens draws as a new session with these tokens, whether its cache is in its slot or
    was evicted; a length beyond the session's is rejected."""
    engine = TorchEngine(policy.model, [chat.end_of_turn], 4, 100)
    prompt = chat.prompt_tokens("take the key")
    first = engine.open(prompt)
    engine.request(first, 7, Sampling(max_tokens=6))
    (turn,) = engine.advance()
    whole = [*prompt, *turn.token_ids]
    for length in (len(prompt), len(prompt) + 2, len(whole)):
        sessions = [engine.open((), engine.snapshot(first, length)), engine.open(whole[:length])]
        for session in sessions:
            engine.request(session, 11, Sampling(max_tokens=6))
        turns = []
        while len(turns) < 2:
            turns += engine.advance()
        assert turns[0].token_ids == turns[1].token_ids
        assert turns[0].logprobs == pytest.approx(turns[1].logprobs, abs=1e-5)
    assert engine.counters["evictions"] > 0
    for length in (0, len(whole) + 1):
        with pytest.raises(ValueError, match="can't copy its first"):
            engine.snapshot(first, length)


def test_candidate_entropy_over_top_tokens(policy, chat):
    """Uniform over 4 of 8 tokens: the top 2 give 2 * 1/4 ln 4. Turns have entropies, one per token, only if requested."""
    logits = torch.tensor([[0.0] * 4 + [-100.0] * 4] * 2)
    found = candidate_entropy(logits, torch.ones(2).double(), torch.tensor([2, 10]))
    assert found.tolist() == pytest.approx([0.5 * math.log(4), math.log(4)])
    engine = TorchEngine(policy.model, [chat.end_of_turn], 4, 100)
    for candidates in (0, 400):
        engine.request(engine.open(chat.prompt_tokens("take the key")), 7, Sampling(max_tokens=6, candidates=candidates))
    turns = []
    while len(turns) < 2:
        turns += engine.advance()
    without, scored = sorted(turns, key=lambda turn: turn.session)
    assert without.entropies == ()
    assert without.token_ids == scored.token_ids
    assert len(scored.entropies) == len(scored.token_ids)
    ids = torch.tensor([[*chat.prompt_tokens("take the key"), *scored.token_ids]])
    mask = torch.arange(ids.shape[1])[None] >= ids.shape[1] - len(scored.token_ids)
    with torch.no_grad():
        entropy = score_tokens(policy.model, ids, mask, entropy=True).entropy
    torch.testing.assert_close(torch.tensor(scored.entropies), entropy[0, -len(scored.token_ids) :].float(), atol=1e-4, rtol=1e-4)


def test_random_plan_requests_no_entropies(policy, chat):
    plan = plan_of(policy, kind="random")
    assert isinstance(plan, EntropyPlan)
    assert plan.candidates == 0
    assert any(episode.parent for episode in run(policy, chat, plan)[0])
