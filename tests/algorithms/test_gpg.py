import pytest

from stages.algorithms.algorithm import resolve
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError


def test_alpha_compensates_for_dead_groups(make_batch):
    """Two of four groups are dead: alpha = 2 doubles the centred returns of +-0.5."""
    algorithm = resolve(Rl(algorithm="gpg", group_size=2))
    batch = algorithm.prepare(make_batch([[1, 0], [1, 1], [0, 0], [0, 1]]))
    assert batch.advantages[:, 1].tolist() == [1, -1, 0, 0, 0, 0, -1, 1]
    assert batch.metrics["alpha"] == 2.0


def test_without_dead_groups_equals_scaled_rloo(make_batch):
    rewards = [[1, 0], [0, 1]]
    gpg, rloo = (resolve(Rl(algorithm=name, group_size=2)).prepare(make_batch(rewards)) for name in ("gpg", "rloo"))
    assert gpg.advantages.tolist() == (rloo.advantages / 2).tolist()


def test_settings_and_group_size_are_checked(make_batch):
    capped = resolve(Rl(algorithm="gpg", group_size=2, settings={"most": 1.5}))
    assert capped.prepare(make_batch([[1, 0], [1, 1]])).advantages[0, 1] == 0.75
    with pytest.raises(ParamsError, match=r"rl\.settings\.mots"):
        resolve(Rl(algorithm="gpg", settings={"mots": 1.5}))
    with pytest.raises(ParamsError, match=r"rl\.group_size is 1"):
        resolve(Rl(algorithm="gpg", group_size=1))
