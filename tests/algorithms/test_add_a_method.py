"""docs/extending.md shows the shipped example of a method and its test; the module alone adds the method."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from stages.algorithms import methods
from stages.algorithms.algorithm import resolve
from stages.algorithms.registry import cards, composition, names
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/extending.md"
NAME = "added"


def block(page: str, name: str) -> str:
    """The code block of a page that is marked so."""
    found = re.search(rf"<!-- example:{name} -->\n```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    assert found, f"{page} has no block 'example:{name}'"
    return found.group(1)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's module under a name that is not there yet, put where methods are looked for."""
    (tmp_path / f"{NAME}.py").write_text(block(PAGE, "module").replace("gpg", NAME))
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{methods.__name__}.{NAME}", raising=False)


def test_the_pages_show_the_shipped_files() -> None:
    assert block(PAGE, "module") == (ROOT / "stages/algorithms/methods/gpg.py").read_text()
    assert block(PAGE, "test") == (ROOT / "tests/algorithms/test_gpg.py").read_text()


def test_the_example_is_about_thirty_lines() -> None:
    code = [line for line in block(PAGE, "module").splitlines() if line.strip()]
    assert 25 <= len(code) <= 40


def test_one_module_is_all_it_takes(added: None, make_batch) -> None:
    """Contract: the file alone makes the name known, the card is whole, the method runs and is told apart from typos."""
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
    from stages.runtime import installed

    class Entry:
        value = "outside"

        def load(self):
            return composition("gpg")

    def found(group: str, search_path: tuple[str, ...]) -> dict[str, Entry]:
        assert group == "bellwether.algorithms"
        return {"outside": Entry()}

    monkeypatch.setattr(installed, "_installed", found)
    assert "outside" in names()
    assert composition("outside").card.slug == "gpg"
