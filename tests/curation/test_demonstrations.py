"""Expert and noisy demonstrations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from stages.curation.demonstrations import (
    EXPERT,
    NOISY,
    DemonstrationPlan,
    Demonstrations,
    check_expert,
    demonstrate,
    demonstrate_all,
    fault,
    play,
)
from stages.curation.settings import Curate
from stages.environments.search import SearchDomain
from stages.records.task import Task

PLAN = DemonstrationPlan(Curate(noise=0.5, noisy_demonstrations=2), seed=1, max_length=640)


@pytest.fixture
def train(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if task.split == "train"][:8]


def test_expert_demonstration_records_the_episode(domain: SearchDomain, train: list[Task], tmp_path: Path) -> None:
    task = next(task for task in train if task.difficulty == 2)
    episode = play(domain, domain.make(tmp_path / "worlds"), task, 0.0, ("expert-0", 0, 1))
    assert episode is not None
    chain = task.spec["chain"]
    actions = [f"search {hop['name']} {hop['relation']}" for hop in chain] + [f"answer {task.spec['answer']}"]
    assert [turn.action for turn in episode.turns] == actions
    assert [turn.action_key for turn in episode.turns] == [action.lower() for action in actions]
    assert [message["content"] for message in episode.messages[1::2]] == actions
    assert [message["role"] for message in episode.messages] == ["user", "assistant"] * 3
    assert episode.messages[0]["content"] == task.prompt
    assert episode.messages[2]["content"] == episode.turns[0].observation
    assert (episode.success, episode.terminated, episode.truncated, episode.stop_reason) == (True, True, False, "terminated")
    assert episode.token_ids == episode.owner == episode.logprob == episode.turn == []
    assert episode.policy_hash == EXPERT


def test_kept_demonstrations_succeed_and_differ(domain: SearchDomain, train: list[Task], tmp_path: Path) -> None:
    environment = domain.make(tmp_path / "worlds")
    noisy = 0
    for task in train:
        result = demonstrate(domain, environment, task, PLAN)
        assert all(episode.success for episode in result.episodes)
        transcripts = [str(episode.messages) for episode in result.episodes]
        assert len(set(transcripts)) == len(transcripts)
        assert len({episode.episode_id for episode in result.episodes}) == len(result.episodes)
        for episode in result.episodes:
            assert (episode.policy_hash == NOISY) == (episode.reward_terms["random_actions"] > 0)
            noisy += episode.policy_hash == NOISY
    assert noisy >= len(train)


def test_rejection_reasons(domain: SearchDomain, train: list[Task], tmp_path: Path) -> None:
    episode = play(domain, domain.make(tmp_path / "worlds"), train[0], 0.0, ("expert-0", 0, 1))
    assert episode is not None
    assert fault(episode, [], PLAN) is None
    assert fault(None, [], PLAN) == "no_expert_action"
    assert fault(episode, [episode], PLAN) == "near_duplicate"
    assert fault(episode, [], replace(PLAN, max_length=5)) == "too_long"
    assert fault(replace(episode, reward=0.0), [], PLAN) == "failed"
    assert fault(replace(episode, reward=0.0, truncated=True, terminated=False), [], PLAN) == "turn_limit"
    assert fault(replace(episode, policy_hash=NOISY), [], PLAN) == "no_random_action"


def test_demonstrations_do_not_depend_on_other_tasks(domain: SearchDomain, train: list[Task], tmp_path: Path) -> None:
    folder = tmp_path / "worlds"
    together = list(demonstrate_all(domain, folder, train, PLAN, 1))
    alone = [next(demonstrate_all(domain, folder, [task], PLAN, 1)) for task in reversed(train)]
    assert together == alone[::-1]


def test_demonstrations_do_not_depend_on_process_count(domain: SearchDomain, train: list[Task], tmp_path: Path) -> None:
    folder = tmp_path / "worlds"
    assert list(demonstrate_all(domain, folder, train, PLAN, 2)) == list(demonstrate_all(domain, folder, train, PLAN, 1))


def test_no_noise_gives_no_noisy_demonstrations(domain: SearchDomain, train: list[Task], tmp_path: Path) -> None:
    plan = replace(PLAN, curate=Curate(noise=0.0))
    result = demonstrate(domain, domain.make(tmp_path / "worlds"), train[0], plan)
    assert [episode.policy_hash for episode in result.episodes] == [EXPERT]
    assert not result.rejected


def test_expert_that_solves_too_little_warns_or_fails(domain: SearchDomain, train: list[Task], tmp_path: Path) -> None:
    """Contract: an expert without usable demonstrations ends curate, one that solves less than half gives a warning; noisy
    episodes do not count."""
    episode = play(domain, domain.make(tmp_path / "worlds"), train[0], 0.0, ("expert-0", 0, 1))
    assert episode is not None
    once = Curate(expert_demonstrations=1)

    def lines(kept: int, curate: Curate = once, **rejected: int) -> list[str]:
        reasons = Counter({f"expert:{reason}": count for reason, count in rejected.items()})
        reasons["noisy:failed"] = 99
        noisy = replace(episode, policy_hash=NOISY)
        return check_expert("search", Demonstrations([episode] * kept + [noisy] * 3, reasons), curate)

    assert lines(8) == lines(5, failed=3, turn_limit=2) == lines(4, failed=5, near_duplicate=2) == []
    (line,) = lines(2, failed=2, no_expert_action=1)
    assert "domain search: the expert solved only 2 of 5 tasks (failed 2, no_expert_action 1)" in line
    with pytest.raises(
        ValueError, match=r"none of the expert's 9 demonstrations.*\(failed 8, too_long 1\).*expert_demonstrations: 0"
    ):
        lines(0, failed=8, too_long=1)
    assert lines(0, Curate(expert_demonstrations=0), failed=8) == [], "noisy demonstrations suffice"
    with pytest.raises(ValueError, match=r"none of the expert's 6 demonstrations.*\(turn_limit 6\)"):
        check_expert("search", Demonstrations([], Counter({"noisy:turn_limit": 6})), Curate(expert_demonstrations=0))
    assert check_expert("search", Demonstrations(), Curate(expert_demonstrations=0, noisy_demonstrations=0)) == []


def test_terms_are_summed_over_the_steps(train: list[Task], tmp_path: Path) -> None:
    """As rollouts sum them."""
    from stages.environments.registry import load_domain

    domain = load_domain("search", {"judge": {}})
    (task, *_) = domain.build(list(domain.recipes(8, 3)), tmp_path / "worlds", 1)
    environment = domain.make(tmp_path / "worlds")
    episode = play(domain, environment, task, 0.0, ("expert-0", 0, 1))
    assert episode is not None
    judged = sum(turn.action.startswith("judge") for turn in episode.turns)
    assert judged > 0
    assert sum(value for name, value in episode.reward_terms.items() if name.startswith("judge_")) == judged
