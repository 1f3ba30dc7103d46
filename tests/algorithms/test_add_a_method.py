"""docs/add-a-method.md: the method that the page adds is added and runs, from the page's own text."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from stages.algorithms import methods
from stages.algorithms.compose import resolve
from stages.algorithms.registry import composition, names
from stages.parameters.rl import Rl
from stages.validation import ParamsError

PAGE = Path(__file__).resolve().parents[2] / "docs/add-a-method.md"


def block(name: str) -> str:
    """The code block of the page that is marked so."""
    found = re.search(rf"<!-- example:{name} -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert found, f"docs/add-a-method.md has no block 'example:{name}'"
    return found.group(1)


@pytest.fixture
def gpg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's module, put where methods are looked for."""
    (tmp_path / "gpg.py").write_text(block("module"))
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "stages.algorithms.methods.gpg", raising=False)


def test_the_example_is_about_thirty_lines() -> None:
    code = [line for line in block("module").splitlines() if line.strip()]
    assert 25 <= len(code) <= 40


def test_one_module_is_all_it_takes(gpg: None) -> None:
    """Contract: the file alone makes the name known, the card is whole, the method resolves and is told apart from typos."""
    assert "gpg" in names()
    assert composition("gpg").card.switch == "rl.algorithm: gpg"
    rl = resolve(Rl(algorithm="gpg")).rl
    assert (rl.advantage.estimator, rl.loss.kind, rl.settings.most) == ("own", "policy_gradient", 8.0)
    assert json.loads(rl.model_dump_json())["settings"] == {"most": 8.0}
    assert resolve(Rl(algorithm="gpg", advantage={"estimator": "group", "mean": "group"})).rl.advantage.estimator == "group"
    with pytest.raises(ParamsError, match="did you mean 'gpg'"):
        resolve(Rl(algorithm="gpgg"))


def test_the_pages_tests_pass(gpg: None, make_batch, tmp_path: Path) -> None:
    path = tmp_path / "test_gpg.py"
    path.write_text(block("test"))
    tests = {name: function for name, function in runpy.run_path(str(path)).items() if name.startswith("test_")}
    assert len(tests) == 3
    for function in tests.values():
        function(make_batch)


def test_methods_of_other_packages_are_found_by_entry_point(gpg: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages.algorithms import registry

    class Entry:
        name = "outside"

        def load(self):
            return composition("gpg")

    def entry_points(group: str, name: str | None = None) -> list[Entry]:
        assert group == "bellwether.algorithms"
        return [Entry()] if name in (None, "outside") else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert "outside" in names()
    assert composition("outside").card.slug == "gpg"
