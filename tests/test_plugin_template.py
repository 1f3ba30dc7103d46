"""The template package of examples/plugin: docs/extending.md shows its files; pip installs it; `check` finds mistakes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "examples" / "plugin"


RESET = """class MazeEnvironment(ValueEnvironment[MazeState]):
    def reset(self, task):
        super().reset(task)
        return ""
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH into which pip installed a copy of the template, without network."""
    source, target = (tmp_path_factory.mktemp("template") / name for name in ("source", "target"))
    shutil.copytree(TEMPLATE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def package(installed: Path, tmp_path: Path) -> Path:
    """A copy of the installed template that a test may modify, without bytecode, which is too old after an edit."""
    shutil.copytree(installed, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_extending_page_shows_the_whole_template() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    shown = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```\n", page, re.S))
    files = [TEMPLATE / "pyproject.toml", *(TEMPLATE / "maze_plugin").glob("*.py")]
    named = {str(path.relative_to(ROOT)): path.read_text() for path in files if path.name != "__init__.py"}
    assert shown == named


def run_check(package: Path, part: str, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"stages.{part}", "check", name]
    environment = {"PYTHONPATH": f"{package}:{ROOT}", "PATH": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("environments", "maze"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("algorithms", "rank_pg"), ("merging", "largest"))),
    ],
)
def test_template_passes_its_checks(installed: Path, part: str, name: str) -> None:
    done = run_check(installed, part, name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout


def test_template_imports_only_stable_names() -> None:
    for path in (TEMPLATE / "maze_plugin").glob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith("from stages"):
                assert line.startswith("from stages.plugins import"), f"{path}: {line}"


@pytest.mark.parametrize(
    ("module", "old", "new", "part", "name", "words"),
    [
        ("maze", "    Settings = MazeSettings\n", "", "environments", "maze", "it has no `Settings`"),
        ("maze", "class MazeDomain(", "class class MazeDomain(", "environments", "maze", "can't be loaded: SyntaxError"),
        ("maze", "    def make(", "    def made(", "environments", "maze", "it lacks make"),
        (
            "maze",
            "    def _start(",
            "    def _opening(",
            "environments",
            "maze",
            "Can't instantiate abstract class MazeEnvironment",
        ),
        ("maze", 'name = "maze"\n    Settings', 'name = "mazes"\n    Settings', "environments", "maze", "its `name` is 'mazes'"),
        ("maze", "class MazeEnvironment(ValueEnvironment[MazeState]):\n", RESET, "environments", "maze", "reset returned str"),
        ("maze", '"east" if self._state.x < self._goal[0] else "north"', '"west"', "environments", "maze", "does not succeed"),
        pytest.param(
            *("rank_pg", "return batch.with_(", "return dict(", "algorithms", "rank_pg", "piece advantage returned dict"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "rank_pg", 'slug="rank_pg"', 'slug="rank"', "algorithms", "rank_pg", "its slug is 'rank'", marks=pytest.mark.slow
        ),
        pytest.param("largest", ".gather(0, kept)[0]", "", "merging", "largest", "shape", marks=pytest.mark.slow),
        ("largest", "    Settings = LargestSettings\n", "", "merging", "largest", "it lacks Settings"),
        pytest.param(
            *("largest", "    Settings = LargestSettings\n", "    Settings = LargestSettings\n    trains = True\n"),
            *("merging", "largest", "has trains set, but methods of other packages merge weights"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistakes_are_reported_with_file_and_line(
    package: Path, module: str, old: str, new: str, part: str, name: str, words: str
) -> None:
    """Contract: a mistake in a plugin is never a raw traceback; the message names file and line."""
    path = package / "maze_plugin" / f"{module}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = run_check(package, part, name)
    output = done.stdout + done.stderr
    assert done.returncode in (1, 2), output
    assert words in output, output
    assert f"{module}.py:" in output, output
    assert "Traceback" not in output


def test_stages_report_file_and_line_of_a_wrong_result(package: Path) -> None:
    """Contract: rollouts in an outside environment, too, raise ParamsError, which stages print."""
    path = package / "maze_plugin" / "maze.py"
    path.write_text(path.read_text().replace("class MazeEnvironment(ValueEnvironment[MazeState]):\n", RESET))
    code = (
        "import sys; from pathlib import Path; from stages.environments.registry import open_domain\n"
        "domain = open_domain('maze'); folder = Path(sys.argv[1]); tasks = domain.build(list(domain.recipes(3, 0)), folder, 1)\n"
        "try: domain.make(folder).reset(tasks[0])\n"
        "except ValueError as error: print(type(error).__name__, error)"
    )
    command = [sys.executable, "-c", code, str(package / "built")]
    environment = {"PYTHONPATH": f"{package}:{ROOT}", "PATH": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ParamsError")
    assert "reset returned str, not Observation" in done.stdout
    assert "maze.py:" in done.stdout


@pytest.mark.parametrize(
    ("part", "group"),
    [
        ("environments", "domains"),
        pytest.param("algorithms", "algorithms", marks=pytest.mark.slow),
        ("merging", "mergers"),
    ],
)
def test_unknown_name_error_says_how_to_install_a_plugin(installed: Path, part: str, group: str) -> None:
    done = run_check(installed, part, "nothing_of_the_kind")
    assert done.returncode == 2
    assert "Known: " in done.stdout
    assert f"bellwether.{group}" in done.stdout
    assert "pip install -e" in done.stdout


def test_settings_of_an_outside_merger_are_checked(installed: Path) -> None:
    """Contract: `merge.settings` holds the method's own keys; a misspelt one is reported with the nearest known key."""
    code = (
        "import yaml; from stages.params import parse_params; v = yaml.safe_load(open('params.yaml'))\n"
        "for given in ({'scale': 2.0}, {'scael': 2.0}):\n"
        "    try: print(parse_params({**v, 'merge': {'method': 'largest', 'settings': given}}).merge.settings)\n"
        "    except ValueError as error: print(error)\n"
        "import sys; print('torch' in sys.modules)"
    )
    environment = {"PYTHONPATH": f"{installed}:{ROOT}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "{'scale': 2.0}" in done.stdout
    assert "'merge.settings.scael'. Did you mean 'scale'?" in done.stdout
    assert done.stdout.endswith("False\n")
