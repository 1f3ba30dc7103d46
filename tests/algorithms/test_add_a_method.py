"""Adding a method takes one module."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stages.algorithms import methods
from stages.algorithms.algorithm import resolve
from stages.algorithms.registry import cards, composition, names
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[2]
NAME = "added"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of gpg under a new name, in a folder where methods are found."""
    (tmp_path / f"{NAME}.py").write_text((ROOT / "stages/algorithms/methods/gpg.py").read_text().replace("gpg", NAME))
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{methods.__name__}.{NAME}", raising=False)


def test_one_module_registers_a_method(added: None, make_batch) -> None:
    """Contract: the file alone registers the name, its card is complete, the method runs, and misspelt names suggest it."""
    assert NAME in names()
    assert NAME in [card.slug for card in cards()]
    assert composition(NAME).card.switch == f"rl.algorithm: {NAME}"
    rl = resolve(Rl(algorithm=NAME)).rl
    assert (rl.advantage.estimator, rl.loss.kind, rl.settings.most) == ("own", "policy_gradient", 8.0)
    assert json.loads(rl.model_dump_json())["settings"] == {"most": 8.0}
    assert resolve(Rl(algorithm=NAME, advantage={"estimator": "group", "mean": "group"})).rl.advantage.estimator == "group"
    shipped, own = (resolve(Rl(algorithm=name, group_size=2)).prepare(make_batch([[1, 0], [1, 1]])) for name in ("gpg", NAME))
    assert shipped.advantages is not None
    assert own.advantages is not None
    assert own.advantages.equal(shipped.advantages)
    with pytest.raises(ParamsError, match=f"did you mean '{NAME}'"):
        resolve(Rl(algorithm=f"{NAME}d"))


def test_methods_of_other_packages_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from stages.runtime import entry_points

    class Entry:
        value = "outside"

        def load(self):
            return composition("gpg")

    def found(group: str, search_path: tuple[str, ...]) -> dict[str, Entry]:
        assert group == "bellwether.algorithms"
        return {"outside": Entry()}

    monkeypatch.setattr(entry_points, "_installed", found)
    assert "outside" in names()
    assert composition("outside").card.slug == "gpg"
