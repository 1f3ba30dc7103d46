"""Step credit compared with exact advantages: hand-computed numbers, and the page made from the result files."""

from __future__ import annotations

import numpy as np
import pytest

from stages.algorithms.algorithm import resolve
from stages.algorithms.settings import Rl
from stages.claims.experiment import FOLDER, load_experiment
from stages.claims.results import result_path
from stages.claims.step_credit import RESULT, SLUG, StepAdvantages, exact_values, policy_table, step_advantages
from stages.environments.keydoor import KeydoorDomain
from stages.environments.keydoor.settings import KeydoorSettings, WeightedLevel
from stages.params import ROOT
from stages.records.episode import Episode, Owner, TurnRecord, write_json
from stages.reporting import step_credit_page
from stages.training.common.batches import trajectory_batch


def test_correlation_interval_and_same_sign() -> None:
    scored = StepAdvantages(np.array([1.0, 1.0, 0.0, -1.0]), np.array([0.5, -0.5, 0.5, -0.5]), np.array([0, 0, 1, 1]))
    assert scored.correlation() == pytest.approx(float(np.corrcoef(scored.given, scored.exact)[0, 1]))
    assert scored.same_sign() == 0.5
    low, high = scored.interval()
    assert -1.0 <= low <= scored.correlation() <= high <= 1.0
    assert StepAdvantages(np.zeros(3), np.arange(3.0), np.zeros(3)).correlation() == 0.0


@pytest.fixture
def group():
    """A world of one corridor room and three side rooms, and a group of four episodes: success, failure, success, no move."""
    domain = KeydoorDomain(KeydoorSettings(max_turns=4, levels=(WeightedLevel(corridor=1, doors=0, side_rooms=3),)))
    (task,) = domain.build(list(domain.recipes(1, 0)), ROOT / "data", 1)
    environment = domain.make(ROOT / "data")
    environment.reset(task)
    best = []
    while (action := domain.expert(environment)) is not None:
        best.append(action)
        environment.step(action)
    start = task.spec["start"]
    episodes = []
    for row, actions in enumerate([best, [best[0], f"go {start}", "look", "look"], best, ["look"] * 4]):
        environment.reset(task)
        episode = Episode(f"{task.task_id}/{row}", task.task_id, "keydoor", task.task_id, 0, "", "", 1.0, 1.0, 0)
        episode.append([1, 2], Owner.PROMPT, -1)
        for turn, action in enumerate(actions):
            before = environment.state_key()
            step = environment.step(action)
            at = len(episode.token_ids)
            episode.append([3, 4], Owner.POLICY, turn, [-1.0, -1.0])
            episode.turns.append(TurnRecord(action, "", step.accepted, step.reward, 1.0, before, action, at, at + 2))
            episode.reward += step.reward
        episode.terminated, episode.truncated = step.terminated, step.truncated
        episodes.append(episode)
    return domain, task, episodes


def test_salt_correlates_better_with_exact_advantages_than_grpo(group) -> None:
    """Exact advantages are those of the policy shown by the four episodes. SALT, which gives the shared first step of three
    episodes one advantage, correlates better with them than outcomes do."""
    domain, task, episodes = group
    assert [episode.success for episode in episodes] == [True, False, True, False]
    exact = exact_values([task], domain.settings, episodes)
    first = episodes[0].turns[0]
    assert policy_table(episodes)[first.state_key] == {first.action_key: 3.0, "look": 6.0}
    found = {}
    for name in ("grpo", "salt"):
        algorithm = resolve(Rl(algorithm=name, group_size=4))
        batch = algorithm.prepare(trajectory_batch(episodes))
        scored = step_advantages(batch, episodes, exact)
        assert len(scored.given) == sum(len(episode.turns) for episode in episodes)
        assert scored.given[0] == pytest.approx(float(batch.advantages[0][batch.mask[0]][0]))
        values = exact[task.task_id].episode([turn.action_key for turn in episodes[1].turns])
        assert scored.exact[len(episodes[0].turns) :][:4] == pytest.approx([step.advantage for step in values])
        found[name] = scored.correlation()
    assert found["salt"] > found["grpo"]


def test_page_shows_the_measurements(tmp_path) -> None:
    """With and without runs; none before the advantages were compared; runs of an outdated experiment are left out."""
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / f"{SLUG}.yaml").write_text((ROOT / FOLDER / f"{SLUG}.yaml").read_text())
    assert step_credit_page.files(tmp_path) == {}
    one = {"correlation": 0.25, "low": 0.1, "high": 0.4, "same_sign": 0.5, "steps": 1000, "calls": 900, "merged_steps": 0.0}
    methods = {name: dict(one) for name in step_credit_page.NAMES}
    methods["salt"] |= {"correlation": 0.375, "merged_steps": 0.5}
    write_json(
        tmp_path / RESULT, {"tasks": 3, "episodes": 96, "success": 0.4, "counted": 768, "methods": methods, "commit": "0" * 40}
    )
    files = step_credit_page.files(tmp_path)
    page = files[step_credit_page.PAGE]
    assert "| SALT | 0.375 (0.100 to 0.400) | 50 % | 50 % | 1,000 | 900 | – | – |" in page
    assert files == step_credit_page.files(tmp_path)
    measured = [{step_credit_page.SPEED: 0.5 + seed / 10, step_credit_page.END: 0.25} for seed in range(2)]
    runs = {f"salt/{seed}": {"metrics": metrics} for seed, metrics in enumerate(measured)}
    fixed = load_experiment(tmp_path / FOLDER / f"{SLUG}.yaml").fixed
    write_json(result_path(tmp_path, SLUG), {"fixed": fixed, "runs": runs})
    assert "| 55.0 % (50.0, 60.0) | 25.0 % (25.0, 25.0) |" in step_credit_page.files(tmp_path)[step_credit_page.PAGE]
    write_json(result_path(tmp_path, SLUG), {"fixed": "outdated", "runs": runs})
    assert "55.0 %" not in step_credit_page.files(tmp_path)[step_credit_page.PAGE]


def test_page_lists_every_arm_of_the_experiment() -> None:
    assert list(load_experiment(ROOT / FOLDER / f"{SLUG}.yaml").arms) == list(step_credit_page.NAMES)
