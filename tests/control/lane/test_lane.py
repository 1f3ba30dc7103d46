"""The lane: its settings and dvc.yaml, runs that go on after a kill, films, statistics, and the page."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from stages.control import one_run
from stages.control.lane import films, runs
from stages.control.lane.runs import play_method, scratch_of
from stages.control.lane.settings import PARAMS, Film, Lane, load_lane
from stages.control.lane.statistics import improvement, iqm_curve, last_scores
from stages.control.offline.settings import KINDS
from stages.control.reach import ravl
from stages.reporting.blocks import Figures
from stages.reporting.control_page import baselines, bound_figures, render_control_page, results_table, spread
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[3]
TASK = {"task": "Pendulum-v1", "steps": 40, "evaluate_every": 20, "warm_up": 10, "batch": 8, "width": 8, "evaluate_episodes": 1}
TINY: dict[str, Any] = {
    "seeds": 2,
    "film": None,
    "scales": {"Pendulum-v1": {"low": -1200.0, "high": -150.0}},
    "methods": {
        "sac": {"problem": "gymnasium", "settings": TASK, "title": "SAC"},
        "ppo": {"problem": "on_policy", "settings": {"task": "Pendulum-v1", "steps": 64, "evaluate_every": 32, "horizon": 4}},
        "ravl": {"problem": "reach", "settings": {"rollouts": 50}},
    },
}


def write(root: Path, values: dict[str, Any]) -> Path:
    path = root / PARAMS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    for part in ("control", "values", "records"):
        (root / "stages" / part).mkdir(parents=True, exist_ok=True)
    for file in ("stages/seeding.py", "stages/environments/wordle/rules.py"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, root / file)
    shutil.copytree(ROOT / "stages/control/lane", root / "stages/control", dirs_exist_ok=True)
    return path


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lane, dict[str, dict[str, Any]]]]:
    """The lane of TINY and its results, with one thread as the command has it."""
    threads = torch.get_num_threads()
    runs.one_thread()
    root = tmp_path_factory.mktemp("lane")
    path = write(root, TINY)
    found = {name: play_method(root, path, name, workers=1) for name in TINY["methods"]}
    yield load_lane(path), found
    torch.set_num_threads(threads)


def test_shipped_settings_are_valid_and_in_dvc_yaml() -> None:
    """Contract: every method has a stage, and methods that learn from data depend on it."""
    lane = load_lane(ROOT / PARAMS)
    stages = yaml.safe_load((ROOT / "reports/control/dvc.yaml").read_text())["stages"]
    offline = [name for name, method in lane.methods.items() if method.dataset]
    assert stages["run_offline"]["matrix"]["method"] == offline
    assert stages["run"]["matrix"]["method"] == [name for name in lane.methods if name not in offline]
    assert stages["data"]["matrix"]["name"] == list(lane.data)
    assert "data/control" in stages["run_offline"]["deps"]
    used = {str(lane.methods[name].settings["dataset"]) for name in offline}
    assert {name.partition("/")[2].removesuffix("-v0") for name in used} == set(KINDS)


@pytest.mark.slow
def test_results_do_not_depend_on_workers_or_on_a_kill(
    played: tuple[Lane, dict[str, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, TINY)
    assert play_method(tmp_path, path, "ppo", workers=2) == played[1]["ppo"]
    play = runs.play_seed

    def killed(path: Path, name: str, seed: int, scratch: Path) -> dict[str, Any]:
        if seed == 1:
            raise KeyboardInterrupt
        return play(path, name, seed, scratch)

    monkeypatch.setattr(runs, "play_seed", killed)
    with pytest.raises(KeyboardInterrupt):
        play_method(tmp_path, path, "sac", workers=1)
    seen: list[int] = []
    monkeypatch.setattr(runs, "play_seed", play)
    learn = runs.learn
    monkeypatch.setattr(runs, "learn", lambda module, settings: seen.append(settings.seed) or learn(module, settings))
    assert play_method(tmp_path, path, "sac", workers=1) == played[1]["sac"]
    assert seen == [1]


def test_runs_have_curves_where_something_is_played(played: tuple[Lane, dict[str, dict[str, Any]]]) -> None:
    sac, ravl = played[1]["sac"], played[1]["ravl"]
    assert sac["task"] == "Pendulum-v1"
    assert sac["steps"] == [20, 40]
    assert [len(run) for run in sac["returns"]] == [2, 2]
    assert len(sac["figures"]["return_end"]) == 2
    assert ravl["steps"] == []
    assert set(ravl["figures"]) >= {"return", "suboptimality"}


def test_figures_are_rliable_s_by_hand() -> None:
    """Of four runs, the middle two count; of each run, the second half of its evaluations."""
    returns = [[0.0, 1.0], [0.0, 3.0], [0.0, 5.0], [0.0, 100.0]]
    assert [point.value for point in iqm_curve(returns)] == [0.0, 4.0]
    ours, other = {"steps": [5, 10], "returns": returns}, {"steps": [5, 10], "returns": [[9.0, 0.0], [9.0, 4.0]]}
    assert last_scores(ours)[:, 0].tolist() == [1.0, 3.0, 5.0, 100.0]
    found = improvement(ours, other)
    assert found.value == pytest.approx(6 / 8)  # of the pairs with 0 all four, with 4 two
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0


def test_methods_are_compared_after_equal_steps() -> None:
    """The longer run has overtaken the shorter one, but not by where that ends."""
    short = {"steps": [10, 20], "returns": [[1.0, 2.0]]}
    long = {"steps": [10, 20, 30, 40], "returns": [[0.0, 1.0, 8.0, 9.0]]}
    assert last_scores(long).item() == 8.5
    assert improvement(short, long).value == 1.0
    assert improvement(long, short).value == 0.0


def test_the_page_has_curves_tables_and_films(played: tuple[Lane, dict[str, dict[str, Any]]]) -> None:
    lane, found = played
    data = {"pendulum": {"task": "Pendulum-v1", "sets": {}}}
    data["pendulum"]["sets"] = {"pendulum/random-v0": {"episodes": 2, "steps": 400, "mean_return": -1234.5, "sha256": "ab" * 32}}
    pages = [render_control_page(lane, found, {"sac": b"film"}, data) for _ in range(2)]
    assert pages[0] == pages[1]
    assert pages[0].count('class="plot"') == 1
    for text in ("SAC", "ppo", "P(better than SAC)", "-1234.5", "abababababab", "data:image/webp;base64,ZmlsbQ=="):
        assert text in pages[0]
    assert pages[0].count("over-estimation</th>") == 1
    assert spread(found["sac"]["figures"]["overestimation"]) in pages[0]
    assert "model&#39;s error" not in pages[0], "no method has a learnt model"
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", pages[0])


def test_results_by_hand() -> None:
    exact = {"problem": "reach", "task": "", "figures": {"return": [1.0, 2.0, 6.0]}, "steps": [], "returns": [[], [], []]}
    found = results_table({"a": exact}, {})
    assert found == "method,problem,task,figure,mean,lowest,highest\na,reach,,return,3,1,6\n"
    learnt = {"problem": "deep_q", "task": "t", "figures": {}, "steps": [500, 1000], "returns": [[1.0, 2.0], [3.0, 6.0]]}
    points = results_table({"b": learnt}, {}).splitlines()[1:]
    assert points[:2] == ["b,deep_q,t,return at 500,2,1,3", "b,deep_q,t,return at 1000,4,2,6"]
    assert points[2].startswith("b,deep_q,t,end of runs,4,")
    worse = {**learnt, "returns": [[0.0, 1.0], [1.0, 2.0]]}
    assert (
        results_table({"b": worse, "c": learnt}, {"c": "b"}).splitlines()[-1].startswith("c,deep_q,t,improvement over b,0.875,")
    )


def test_bounds_are_drawn_by_the_number_of_episodes() -> None:
    """One figure of the two runs that differ in episodes alone; not of PEVI, and none of one run."""
    settings = {"robust": "kl", "kl_regression": "shifted", "divergence_weight": 0.3}
    methods = {
        **{f"kl_{count}": {"problem": "linear_mdp", "settings": {**settings, "episodes": count}} for count in (1000, 100)},
        "pevi": {"problem": "linear_mdp", "settings": {"robust": "none"}},
    }
    lane = Lane.model_validate({"methods": methods})
    found = {name: {"figures": {"suboptimality": [0.1, 0.2], "bound": [0.4, 0.5]}} for name in methods}
    (figures,) = bound_figures(lane, found, list(methods))
    assert isinstance(figures, Figures)
    assert len(figures.drawings) == 1
    assert bound_figures(lane, found, ["kl_100", "pevi"]) == []


def test_methods_are_compared_with_the_first_of_their_task(played: tuple[Lane, dict[str, dict[str, Any]]]) -> None:
    lane, found = played
    assert baselines(lane, found) == {"ppo": "sac"}


@pytest.mark.parametrize(("task", "package", "actions"), [("CartPole-v1", "pygame", 1), ("Hopper-v5", "imageio", 3)])
def test_a_film_is_an_animation(task: str, package: str, actions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo's tasks are drawn without OpenGL."""
    pytest.importorskip(package)
    monkeypatch.setenv("MUJOCO_GL", "off")
    settings = Film(frames=4, width=64)
    made = [films.film(lambda seen: (seen[:, :1] > 0).float().expand(-1, actions), task, 0, settings) for _ in range(2)]
    assert made[0] == made[1]
    with Image.open(io.BytesIO(made[0])) as image:
        assert image.format == "WEBP"
        assert 1 < image.n_frames <= 4  # equal ones are shown for longer
        assert image.width == 64


def test_films_without_their_package_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ParamsError, match=r"pip install 'bellwether\[control\]', or set film: null"):
        films.film(lambda seen: seen[:, :1] * 0, "CartPole-v1", 0, Film())


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"a": {"problem": "gymnasum"}}, r"there is no problem gymnasum\. Did you mean 'gymnasium'"),
        ({"a": {"problem": "gymnasium", "settings": {"seed": 1}}}, "settings.seed is set for each run"),
        ({"a": {"problem": "gymnasium", "settings": {"stepz": 1}}}, r"unknown key 'methods\.a\.settings\.stepz'.*'steps'"),
        ({"a": {"problem": "offline", "settings": {"dataset": "x/y-v0"}}}, "no data set 'x/y-v0' is made"),
        ({"a": {"problem": "soft_q", "settings": {"dataset": "x/y-v0"}}}, r"a\.settings\.dataset: no data set 'x/y-v0' is made"),
    ],
)
def test_bad_settings_are_refused_by_name(methods: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=message):
        load_lane(write(tmp_path, {"methods": methods}))


@pytest.mark.slow
def test_the_command_refuses_unknown_methods() -> None:
    command = [sys.executable, "-m", "stages.control", "run", "sack"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "there is no method sack in reports/control/params.yaml. Did you mean 'sac'?" in found.stderr


def test_results_are_json_without_paths_or_times(played: tuple[Lane, dict[str, dict[str, Any]]]) -> None:
    for found in played[1].values():
        text = json.dumps({key: value for key, value in found.items() if key != "film"})
        assert "/" not in text


def test_settings_that_a_run_refuses_end_it_with_a_message(tmp_path: Path, monkeypatch, capsys) -> None:
    """Contract: a program of the lane says which setting is wrong, or that the file is missing, and exits with 2."""
    monkeypatch.setattr(one_run, "die_with_parent", lambda: None)
    file = tmp_path / "settings.yaml"
    for text, message in (("critcs: 10\n", "unknown key 'critcs'. Did you mean 'critics'"), (None, "No such file")):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(sys, "argv", ["ravl", "--settings", str(file), "--result", str(tmp_path / "result.json")])
        assert ravl.main() == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


def test_learning_from_a_data_set_that_is_not_made_says_how_to_make_it(tmp_path: Path) -> None:
    write(tmp_path, TINY)
    lane = load_lane(ROOT / PARAMS)
    name = next(name for name, method in lane.methods.items() if method.dataset)
    with pytest.raises(ParamsError, match=r"does not exist; `dvc repro reports/control/dvc\.yaml"):
        scratch_of(tmp_path, lane, name)
