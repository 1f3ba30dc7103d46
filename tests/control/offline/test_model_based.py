"""Offline learning from a model's rollouts: exact dynamics, batches and diagnostics by hand, exact resume, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError

from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.vector_task import VectorTask
from stages.control.offline.datasets import DataSet, PlayedEpisode
from stages.control.offline.imagination import edge_figures, outside, spread
from stages.control.offline.settings import Offline, OfflineDynamics
from stages.control.offline.training import Training, learn, run
from stages.runtime.validation import ParamsError

TINY: dict[str, Any] = {"method": "sac", "updates": 20, "evaluate_every": 10, "batch": 16, "width": 8, "evaluate_episodes": 1}
MODEL: dict[str, Any] = {"width": 8, "epochs": 2, "fit_every": 8, "rollouts": 6, "horizon": {"first": 2, "last": 2}}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def data() -> DataSet:
    """Two random episodes of Pendulum-v1."""
    task, episodes = VectorTask("Pendulum-v1", 2), []
    seen = [task.reset(3)]
    actions, rewards = [], []
    for step in range(60):
        action = task.random(2, generator(step)).numpy()
        outcome = task.step(action)
        seen.append(outcome.following)
        actions.append(task.scaled(action))
        rewards.append(outcome.reward)
    for place in range(2):
        parts = (np.array([one[place] for one in several]) for several in (seen, actions, rewards))
        observations, taken, got = parts
        episodes.append(PlayedEpisode(observations.astype("f4"), taken.astype("f4"), got.astype(float), False))
    return DataSet("pendulum/tiny-v0", "Pendulum-v1", episodes)


def settings(dynamics: dict[str, Any] | None = None, **values: Any) -> Offline:
    return Offline.model_validate({**TINY, **values, "dynamics": None if dynamics is None else {**MODEL, **dynamics}})


EXACT = {"exact": True, "fit_every": 8, "rollouts": 6, "horizon": {"first": 2, "last": 2}}


def exact(**values: Any) -> Offline:
    return Offline.model_validate({**TINY, **values, "dynamics": EXACT})


def test_the_exact_model_is_gymnasiums_pendulum(data: DataSet) -> None:
    training = Training(exact(reward_scale=0.5), data)
    assert training.imagination is not None
    real = training.data.everything()
    training.imagination.fit_model(training.data, training.agent, generator())
    following, reward = training.imagination.model.step(real.observation, real.action, generator())
    assert torch.allclose(following, real.following, atol=1e-4)
    assert torch.allclose(reward, real.reward, atol=1e-3)
    assert training.imagination.fits == 0


def test_a_rollout_of_five_steps_by_hand(data: DataSet) -> None:
    """Contract: 5 transitions, none terminal; the last state is learnt from, and no state of the rollout is updated there."""
    values = {"exact": True, "rollouts": 1, "horizon": {"first": 5, "last": 5}}
    training = Training(Offline.model_validate({**TINY, "dynamics": values}), data)
    imagination = training.imagination
    assert imagination is not None
    imagination.prepare(training.data, training.agent, 0, generator())
    found = imagination.replay.everything()
    assert len(found.reward) == 5
    assert not found.terminated.any()
    assert torch.equal(found.observation[1:], found.following[:-1])
    assert not (found.observation == found.following[-1]).all(1).any()


def test_the_model_is_fitted_once_and_rolled_out_every_so_often(data: DataSet) -> None:
    training = Training(settings({}), data)
    imagination = training.imagination
    assert imagination is not None
    training.round()
    assert (imagination.fits, imagination.replay.added) == (1, 2 * 12)  # at updates 0 and 8
    training.round()
    assert (imagination.fits, imagination.replay.added) == (1, 3 * 12)  # and at 16
    imagination.replay.kept.terminated.fill_(1.0)  # to tell them apart
    assert [training.draw().terminated.sum().item() for _ in range(3)] == [16.0] * 3  # int(0.05 * 16) = 0 are real


def test_with_real_transitions_alone_it_is_sac_on_the_data(data: DataSet) -> None:
    agents = []
    for chosen in (settings(), settings({"real_share": 1.0})):
        training = Training(chosen, data)
        assert training.imagination is None
        training.train()
        agents.append(training.agent)
    for one, other in zip(agents[0].parameters(), agents[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_goes_on_exactly(data: DataSet, tmp_path: Path) -> None:
    chosen = settings({"kind": "probabilistic", "loss": "nll", "members": 3, "elites": 2, "penalty": "mopo"}, critics=3)
    whole = Training(chosen, data)
    whole.train()
    first = Training(chosen, data)
    first.round()
    first.save(tmp_path / "run.pt")
    later = Training(chosen.model_copy(update={"checkpoint": str(tmp_path / "run.pt")}), data)
    later.train()
    assert later.returns == whole.returns
    for one, other in zip(whole.agent.parameters(), later.agent.parameters(), strict=True):
        assert torch.equal(one, other)


def step(observation: list[float], following: list[float], terminated: list[float]) -> Transitions:
    zeros = torch.zeros(len(observation))
    seen, after = (torch.tensor(values)[:, None] for values in (observation, following))
    return Transitions(seen, zeros[:, None], zeros, after, torch.tensor(terminated))


def test_targets_at_the_edge_by_hand() -> None:
    """States 0.1, 1.1 and 2.1 are updated. With cells of 1, of the next states 1.2, 2.9 and 3.5 the last one's is not; where the
    task is over, no value is used."""
    chain = step([0.1, 1.1, 2.1], [1.2, 2.9, 3.5], [0.0, 0.0, 0.0])
    assert outside(chain, torch.ones(1)) == pytest.approx(1 / 3)
    assert outside(step([0.1, 1.1, 2.1], [1.2, 2.9, 3.5], [0.0, 0.0, 1.0]), torch.ones(1)) == 0.0
    assert outside(step([0.1], [5.0], [1.0]), torch.ones(1)) == 0.0


def test_critics_spread_by_hand(data: DataSet) -> None:
    """Constant critics of 1, 3 and 2 differ by the root of 2 / 3 everywhere."""
    training = Training(exact(critics=3), data)
    with torch.no_grad():
        training.agent.critics.weights[-1].zero_()
        training.agent.critics.biases[-1].copy_(torch.tensor([1.0, 3.0, 2.0])[:, None, None])
    state = training.data.everything().observation
    assert spread(training.agent, state) == pytest.approx((2 / 3) ** 0.5)
    assert spread(training.agent, state[:0]) == 0.0
    assert training.imagination is not None
    training.imagination.prepare(training.data, training.agent, 0, generator())
    found = edge_figures(training.imagination, training.data, training.agent, 0, generator())
    assert (found["disagreement_ends"], found["disagreement_inner"]) == pytest.approx(((2 / 3) ** 0.5,) * 2)
    assert (found["q_mean"], found["q_most"]) == pytest.approx((1.0, 1.0))
    assert 0.0 < found["edge_targets"] < 1.0


def test_figures_of_a_run(data: DataSet, tmp_path: Path) -> None:
    from stages.control.offline.datasets import write_dataset

    write_dataset(tmp_path, data, "random")
    found = run(exact(folder=str(tmp_path), dataset="pendulum/tiny-v0", critics=3, aggregate="min_of_2"))
    assert found["model_error"] == pytest.approx(0.0, abs=1e-4)
    assert found["disagreement_inner"] > 0
    assert {"edge_targets", "q_mean", "q_most", "overestimation", "bellman_gap"} <= set(found)
    plain = learn(settings(folder=str(tmp_path), dataset="pendulum/tiny-v0")).figures
    assert not {"edge_targets", "model_error"} & set(plain)


def test_the_policys_spread_is_bounded_as_the_settings_say(data: DataSet) -> None:
    agent = Training(settings(log_std_range=[-5.0, -4.0]), data).agent
    assert agent.policy(torch.randn(9, 3))[1].unique().tolist() == [-4.0]  # first weights give about 0


def test_values_that_diverge_end_the_run(data: DataSet) -> None:
    training = Training(settings(), data)
    with torch.no_grad():
        training.agent.critics.biases[-1].fill_(float("nan"))
    with pytest.raises(ParamsError, match="critics: values are not finite after 10 updates; raise critics"):
        training.round()


def test_exact_dynamics_of_other_tasks_are_refused(data: DataSet) -> None:
    episodes = [PlayedEpisode(np.zeros((3, 2), "f4"), np.zeros((2, 1), "f4"), np.zeros(2), False)]
    with pytest.raises(ParamsError, match=r"dynamics\.exact: the dynamics of MountainCarContinuous-v0 are not known here"):
        Training(exact(), DataSet("car/a-v0", "MountainCarContinuous-v0", episodes))


def documented(key: str) -> dict[str, Any]:
    """The block of docs/control.md that begins with `key`."""
    lines = Path("docs/control.md").read_text(encoding="utf-8").splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("    {" + key))
    last = next(place for place in range(first, len(lines)) if not lines[place].strip())
    return dict(yaml.safe_load("\n".join(lines[first:last])))


def test_the_reference_codes_settings_that_the_docs_name_fit() -> None:
    ravl = Offline.model_validate(documented("method: sac"))
    assert ravl.dynamics is not None
    assert (ravl.dynamics.horizon.at(0), ravl.dynamics.kept_fits, ravl.dynamics.fit_every) == (5, 5, 1000)
    vagram = OffPolicy.model_validate({**documented("warm_up: 10000"), "steps": 100_000})
    assert vagram.dynamics is not None
    assert vagram.dynamics.rollouts == 400 * vagram.dynamics.fit_every
    assert [vagram.dynamics.horizon.at(step) for step in (0, 20_000, 85_000, 150_000)] == [1, 1, 3, 5]


def test_the_papers_defaults_fit() -> None:
    values = {"kind": "probabilistic", "loss": "nll", "members": 7, "elites": 5, "rollouts": 50_000, "penalty": "mopo"}
    found = OfflineDynamics.model_validate(values)
    assert (found.fit_every, found.kept_fits, found.horizon.at(0), found.real_share) == (1000, 5, 5, 0.05)
    assert int(found.real_share * 256) == 12


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "bc", "dynamics": {}}, "dynamics has no effect: it needs method: sac"),
        ({"method": "iql", "aggregate": "mean"}, "aggregate has no effect: it needs method: sac"),
        ({"critics": 1, "aggregate": "mean"}, "aggregate has no effect: it needs two critics or more"),
        ({"tune_alpha": False, "alpha_learning_rate": 1e-3}, "alpha_learning_rate has no effect: it needs tune_alpha: true"),
        ({"dynamics": {"loss": "vagram"}}, "loss vagram weighs errors by values, which are random"),
        ({"log_std_range": [2.0, -5.0]}, "the first, the least, must be below the second"),
        ({"method": "iql", "log_std_range": [-5.0, 2.0]}, "log_std_range has no effect: it needs method: sac"),
        ({"dynamics": {"ramp": 10}}, "ramp has no effect: it needs steps of the task"),
        ({"dynamics": {"exact": True, "members": 3}}, "members has no effect: it needs exact: false"),
        ({"dynamics": {"penalty": "mopo"}}, "penalty mopo needs kind: probabilistic"),
        ({"dynamics": {"penalty_weight": 2.0}}, "penalty_weight has no effect: it needs penalty: mopo"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Offline.model_validate({**TINY, **values})
