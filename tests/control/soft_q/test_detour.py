"""The detour: its task and demonstrations, the agent's target and loss by hand, a kill, rivals, refusals by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from stages.control.off_policy.replay import Demonstrations, Replay, Transitions
from stages.control.off_policy.training import Training
from stages.control.off_policy.vector_task import VectorTask, make_task
from stages.control.soft_q.agent import SoftQAgent
from stages.control.soft_q.arsq import demo_term, encode, reduced
from stages.control.soft_q.detour import CORNER, learn, recorded, run, trained, way
from stages.control.soft_q.settings import DemoTerm, DetourTask, SoftQLearning

DETOUR = "bellwether/Detour-v0"
TINY = {"steps": 20, "evaluate_every": 10, "evaluate_episodes": 2, "batch": 8, "width": 8}


def settings(**values: object) -> DetourTask:
    demonstrations = {"episodes": 4} if values.get("use_demonstrations", True) else {}
    return DetourTask.model_validate({**TINY, **demonstrations, **values})


def walk(actions: list[list[float]]) -> tuple[float, bool]:
    """The sum of rewards of actions from START without spread, and whether the episode is over."""
    task = make_task(DETOUR)
    task.reset(seed=0)
    task.unwrapped.position = np.array([-0.7, -0.7])
    total, over = 0.0, False
    for action in actions:
        assert not over
        _, reward, over, _, _ = task.step(np.array(action, np.float32))
        total += float(reward)
    return total, over


def test_both_ways_around_lead_to_the_goal_and_their_mean_into_the_obstacle() -> None:
    """Of 7 moves in x, then 6 in y: 13 steps and the prize; straight, the third step is inside."""
    assert walk([[1, 0]] * 7 + [[0, 1]] * 6) == (pytest.approx(1.0 - 13 * 0.02), True)
    assert walk([[0, 1]] * 7 + [[1, 0]] * 6) == (pytest.approx(1.0 - 13 * 0.02), True)
    assert walk([[1, 1]] * 3) == (pytest.approx(-1.0 - 3 * 0.02), True)
    assert way(np.array([-0.7, -0.7]), 0).tolist() == [1.0, 0.0]
    assert way(np.array([CORNER, -0.7]), 0).tolist() == [0.0, 1.0]


def test_demonstrations_are_of_mixed_quality() -> None:
    data = recorded(settings(episodes=40, noise=0.05))
    ends = [np.sign(one.rewards[-1]) * one.terminated for one in data.episodes]
    assert ends[20:] == [1.0] * 20
    assert set(ends[0:20:2]) == {-1.0}
    assert {tuple(one.actions[0].round().astype(int)) for one in data.episodes[20:]} == {(1, 0), (0, 1)}
    again = recorded(settings(episodes=40, noise=0.05))
    assert all((one.actions == other.actions).all() for one, other in zip(data.episodes, again.episodes, strict=True))


def test_the_term_is_averaged_over_demonstrations_or_summed_over_the_batch() -> None:
    terms = torch.tensor([1.0, 3.0, 5.0, 7.0])
    assert reduced(terms, 2, "demonstrations").item() == 2.0
    assert reduced(terms, 2, "batch_sum").item() == 16.0
    assert reduced(terms, 0, "demonstrations").item() == 0.0


def batch(count: int) -> Transitions:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2,), (2,), (), (2,))
    parts = (2 * torch.rand(count, *shape, generator=generator) - 1 for shape in shapes)
    return Transitions(*parts, torch.tensor([1.0] + [0.0] * (count - 1)))


def test_target_and_loss_by_hand() -> None:
    """y = r + gamma (1 - d) min V'; errors of both networks, and a weighted term of the first two rows."""
    torch.manual_seed(0)
    values = {"bins": 3, "width": 8, "gamma": 0.5, "demo": {"kind": "logsumexp", "weight": 0.3}}
    agent, data = SoftQAgent(SoftQLearning.model_validate(values), 2, 2, demonstrated=2), batch(4)
    with torch.no_grad():
        agent.slow.state_value.biases[-1][:, 0, 0] = torch.tensor([2.0, 1.0])
        agent.slow.state_value.weights[-1].zero_()
        target = agent.target(data)
        assert target.tolist() == pytest.approx((data.reward + 0.5 * torch.tensor([0.0, 1.0, 1.0, 1.0])).tolist())
        q, advantages = agent.model(data.observation, encode(data.action, 1, 3))
        term = demo_term(advantages, encode(data.action, 1, 3), DemoTerm(kind="logsumexp"))
        expected = ((q - target) ** 2).mean(1) + 0.3 * (term[:, 0] + term[:, 1]) / 2
        assert agent.loss(data).item() == pytest.approx(expected.sum().item(), rel=1e-6)


def test_one_dimension_is_soft_q_learning() -> None:
    """Contract: D = L = 1 is discrete soft Q-learning: V is the soft maximum of Q over the bins."""
    torch.manual_seed(0)
    agent = SoftQAgent(SoftQLearning(bins=4, width=8, alpha=0.2), 2, 1)
    state = torch.ones(4, 2)
    with torch.no_grad():
        q, _ = agent.model(state, torch.arange(4)[:, None])
        value = agent.model.state_value(state[:1])[:, 0, 0]
    assert torch.allclose(0.2 * (q / 0.2).logsumexp(1), value, atol=1e-5)


def test_batches_begin_with_demonstrations_and_the_buffer_with_all_of_them() -> None:
    recorded_steps = Transitions(*(part[:3] for part in vars(batch(4)).values()))
    demonstrations = Demonstrations(recorded_steps, 0.25)
    replay = Replay(10, 2, 2)
    replay.add(Transitions(*(torch.full_like(part, 9.0) for part in vars(recorded_steps).values())))
    drawn = demonstrations.draw(replay, 8, torch.Generator().manual_seed(0))
    assert (drawn.reward == 9.0).tolist() == [False] * 2 + [True] * 6
    training = Training(SoftQLearning(task=DETOUR, steps=10, evaluate_every=10, warm_up=1), demonstrations=demonstrations,
                        make=SoftQAgent)  # fmt: skip
    assert len(training.replay) == 3


@pytest.mark.parametrize("learner", ["arsq", "sac", "bc"])
def test_a_killed_run_goes_on_from_its_checkpoint_to_the_bit(
    learner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = learn(settings(learner=learner))
    assert len(whole.returns) == 2
    file = tmp_path / "checkpoint"
    chosen = settings(learner=learner, checkpoint=str(file))
    from stages.control.offline import training as offline

    module = offline.Training if learner == "bc" else Training
    save = module.save

    def killed(self: object, path: Path) -> None:
        save(self, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(chosen)
    monkeypatch.setattr(module, "save", save)
    assert file.exists()
    assert learn(chosen).figures == whole.figures
    assert not file.exists()


@pytest.mark.parametrize("learner", ["arsq", "sac"])
def test_with_and_without_demonstrations_there_are_as_many_updates(learner: str) -> None:
    """Contract: what demonstrations are worth is compared at equal updates: one per step from the second on."""
    found = [trained(settings(learner=learner, use_demonstrations=given)) for given in (True, False)]
    assert [training.agent.updates for training in found] == [19, 19]
    assert [len(training.replay) for training in found] == [20 + len(found[0].demonstrations.data.reward), 20]


def test_the_least_advantage_is_a_figure() -> None:
    """Of both networks, all bins after the choices of all steps in the buffer; -alpha log 3 at most, that of three even ones."""
    training, found = trained(settings(episodes=4)), run(settings(episodes=4))
    data = training.replay.everything()
    with torch.no_grad():
        advantages = training.agent.model(data.observation, encode(data.action, 1, 3))[1]
    assert found["least_advantage"] == pytest.approx(min(advantages.flatten().tolist()))
    assert found["least_advantage"] <= -0.01 * np.log(3)


def test_figures_are_shares_of_ends() -> None:
    found = run(settings(learner="bc", episodes=20, steps=100, evaluate_every=100, width=32))
    assert 0.0 <= found["success"] + found["hits"] <= 1.0
    assert set(found) == {"success", "hits", "return_end", "return_mean"}


def test_the_errors_of_q_have_a_weight() -> None:
    """A tenth of the plain loss without a term for demonstrations."""
    found = []
    for weight in (1.0, 0.1):
        torch.manual_seed(0)
        agent = SoftQAgent(SoftQLearning(bins=3, width=8, bellman_weight=weight), 2, 2)
        found.append(agent.loss(batch(4)).item())
    assert found[1] == pytest.approx(0.1 * found[0], rel=1e-5)


@pytest.mark.parametrize("acting", ["online", "target"])
def test_either_networks_act(acting: str) -> None:
    """After the slow copies' last layer was set to prefer one bin, and the fast networks' another."""
    torch.manual_seed(0)
    agent = SoftQAgent(SoftQLearning.model_validate({"bins": 3, "width": 8, "act_network": acting}), 2, 1)
    with torch.no_grad():
        for model, best in ((agent.model, 0), (agent.slow, 2)):
            model.heads.weights[-1].zero_()
            model.heads.biases[-1][..., best] = 1.0
    expected = {"online": -2 / 3, "target": 2 / 3}[acting]
    assert agent.greedy(torch.ones(1, 2)).item() == pytest.approx(expected)
    drawn = agent.act(torch.ones(5, 2), 0, torch.Generator().manual_seed(0))
    assert drawn.flatten().tolist() == pytest.approx([expected] * 5)
    assert not any(name.startswith("acting") for name in agent.state_dict())


@pytest.mark.parametrize("learner", ["arsq", "sac"])
def test_updates_per_step(learner: str) -> None:
    assert trained(settings(learner=learner, updates_per_step=2)).agent.updates == 38


def test_weights_decay_towards_zero() -> None:
    """By lr times decay of AdamW in every update, where there is no gradient: with equal targets for both, here beside it."""
    found = []
    for decay in (0.0, 0.5):
        torch.manual_seed(0)
        agent = SoftQAgent(SoftQLearning(bins=3, width=8, weight_decay=decay, learning_rate=1e-2), 2, 2)
        before = agent.model.heads.weights[0].detach().clone()
        agent.update(batch(4), torch.Generator().manual_seed(0))
        found.append(agent.model.heads.weights[0].detach().clone())
    assert torch.allclose(found[1], found[0] - 0.5 * 1e-2 * before, atol=1e-6)


def test_it_can_be_drawn() -> None:
    task = VectorTask(DETOUR, 1, render_mode="rgb_array")
    task.reset(0)
    assert task.environments.envs[0].render().shape == (240, 240, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learner": "bc", "alpha": 0.1}, "alpha has no effect: it needs learner: arsq or sac"),
        ({"learner": "sac", "bins": 5}, "bins has no effect: it needs learner: arsq"),
        (
            {"use_demonstrations": False, "episodes": 150, "careless": 0.1},
            "careless has no effect: it needs use_demonstrations: true",
        ),
        (
            {"use_demonstrations": False, "episodes": 150, "demo": {"kind": "margin"}},
            "demo: there are no demonstrations in a batch",
        ),
        ({"steps": 25}, "must be a multiple of evaluate_every 10"),
        ({"learner": "sac", "act_network": "target"}, "act_network has no effect: it needs learner: arsq"),
        ({"learner": "bc", "updates_per_step": 2}, "updates_per_step has no effect: it needs learner: arsq or sac"),
        ({"demo": {"reduce": "batch_sum"}}, "reduce has no effect with kind: none"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**values)
