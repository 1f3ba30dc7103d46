"""The stage `evaluate`: its models, restarts, shards and workers, and the bytes it writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import yaml
from slow import slow_except

from stages import evaluate, transfer
from stages.agent.chat import Chat
from stages.agent.policy import load_policy
from stages.curation.panel import make_panel, write_panel
from stages.environments.registry import load_domain
from stages.evaluation import panels as panels_module
from stages.evaluation.panels import Settings, load_panels, play
from stages.evaluation.plan import plan_jobs
from stages.params import parse_params
from stages.records.episode import Episode, read_rows, read_tasks, write_episodes, write_tasks
from stages.runtime.shards import Shard
from stages.runtime.stage import LIBRARIES, StageContext, _run_in_forks
from stages.runtime.tracker import Tracker
from stages.runtime.validation import ParamsError

from .helpers import RecordingScorer

PARAMS: dict[str, Any] = {
    "domains": ["search"],
    "resources": {"threads": 1, "workers": 1, "slots": 8},
    "model": {"max_length": 512},
    "evaluate": {"attempts": 2, "resamples": 100, "chunk": 8, "sampling": {"max_tokens": 6}},
    "per_domain": {"search": {}},
}


@pytest.fixture
def context(curated: Path, tiny_policy: Path, tmp_path: Path) -> StageContext:
    from safetensors.torch import load_file, save_file

    for scale, name in enumerate(("data/base", "data/models/sft", "data/models/rl/search"), start=1):
        shutil.copytree(tiny_policy, tmp_path / name)
        weights = {key: tensor * scale for key, tensor in load_file(tiny_policy / "model.safetensors").items()}
        save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    for name in ("merged", "merged_linear"):
        shutil.copytree(tmp_path / "data/models/rl/search", tmp_path / "data/models" / name)
    shutil.copytree(curated, tmp_path / "data/curated")
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    return StageContext("evaluate", None, parse_params(PARAMS), tmp_path, Tracker())


def outputs(context: StageContext) -> dict[str, bytes]:
    paths = [context.data / "evaluation" / "rows.parquet", *sorted(context.reports.glob("*"))]
    return {path.name: path.read_bytes() for path in paths}


def test_models_setting_selects_the_models(context: StageContext) -> None:
    """An unknown name is rejected."""
    chosen = parse_params({**PARAMS, "evaluate": {**PARAMS["evaluate"], "models": ["rl@search", "sft"]}})
    evaluate.run(StageContext("evaluate", None, chosen, context.root, Tracker()))
    evaluation = json.loads((context.reports / "evaluation.json").read_text())
    assert list(evaluation["models"]) == ["rl@search", "sft"]
    assert [(item["a"], item["b"]) for item in evaluation["comparisons"]] == [("rl@search", "sft")]
    with pytest.raises(ParamsError, match=r"rl@chess.*there are base, sft, rl@search, merged"):
        parse_params({**PARAMS, "evaluate": {"models": ["rl@chess"]}})


@pytest.mark.parametrize("by", slow_except(("q", "value"), "value"))
def test_best_of_n_plays_only_panels_with_a_scorer(context: StageContext, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Contract: a model that chooses by a learned scorer is played and compared only on the domains that have one."""
    from stages.values import q_model, token_q

    loaded: list[Path] = []
    monkeypatch.setattr(q_model, "load_q_model", lambda folder, *_: loaded.append(folder) or RecordingScorer())
    monkeypatch.setattr(token_q, "load_token_q", lambda folder, *_: loaded.append(folder) or RecordingScorer())
    domain, folder = load_domain("calculator", {}), context.data / "curated" / "calculator"
    records = [record for record in domain.recipes(64, 0) if record["split"] == "test"][:5]
    tasks = domain.build(records, folder / "worlds", 1)
    write_tasks(folder / "tasks.parquet", tasks)
    write_panel(folder / "panel.json", make_panel(domain, tasks, folder / "worlds"))
    shutil.copytree(context.data / "models/rl/search", context.data / "models/rl/calculator")
    left = {"q": ("q/calculator", q_model.SETTINGS), "value": ("rl/calculator/value", "value.json")}[by]
    made = context.data / "models" / left[0] / left[1]
    made.parent.mkdir(parents=True)
    made.write_text(json.dumps({"params": {"kind": "step_dpo"}}))
    offline = {"rollout": {"tasks": 96}, "rl": {"algorithm": "b_coder"}}
    learns = {"q": {"annotate": {"tasks": 48, "q_model": {"kind": "step_dpo"}}}, "value": offline}[by]
    values = {
        **PARAMS,
        "domains": ["search", "calculator"],
        "per_domain": {"search": {}, "calculator": learns},
        "evaluate": {**PARAMS["evaluate"], "models": ["sft", f"sft+{by}", "sft+vote"], "best_of": {"n": 2}},
    }
    evaluate.run(StageContext("evaluate", None, parse_params(values), context.root, Tracker()))
    assert set(loaded) == {context.data / "models" / {"q": "q", "value": "rl"}[by] / "calculator"}
    rows = read_rows(context.data / "evaluation" / "rows.parquet")
    both = {"search": 16, "calculator": 2 * len(tasks)}
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        of_model = counts.setdefault(row["model"], {})
        of_model[row["domain"]] = of_model.get(row["domain"], 0) + 1
    assert counts == {"sft": both, f"sft+{by}": {"calculator": 2 * len(tasks)}, "sft+vote": both}
    evaluation = json.loads((context.reports / "evaluation.json").read_text())
    assert {name: set(found) for name, found in evaluation["models"].items()} == {name: set(of) for name, of in counts.items()}
    assert [(item["a"], item["b"], item["domain"], item["n"]) for item in evaluation["comparisons"]] == [
        (f"sft+{by}", "sft", "calculator", len(tasks)),
        ("sft+vote", "sft", "search", 8),
        ("sft+vote", "sft", "calculator", len(tasks)),
    ]
    metrics = json.loads((context.reports / "metrics.json").read_text())
    assert {name: list(found) for name, found in metrics.items()} == {"search": ["sft"], "calculator": ["sft"]}
    plotted = [line.split(",")[:2] for line in (context.reports / "evaluation.csv").read_text().splitlines()[1:]]
    assert [one for one in plotted if one[0] == f"sft+{by}"] == [[f"sft+{by}", "calculator"]]
    nobody = {**values, "per_domain": {"search": {}, "calculator": {}}}
    with pytest.raises(ParamsError, match=rf"evaluate\.models: sft\+{by} needs"):
        parse_params(nobody)


def test_closed_book_models_play_the_same_panel_without_tools(context: StageContext) -> None:
    """Contract: in one turn, on the domains that allow it, compared with the same model that has its tools."""
    domain, folder = load_domain("factbook", {}), context.data / "curated" / "factbook"
    tasks = domain.build([record for record in domain.recipes(12, 0) if record["split"] == "test"], folder / "worlds", 1)
    write_tasks(folder / "tasks.parquet", tasks)
    write_panel(folder / "panel.json", make_panel(domain, tasks, folder / "worlds"))
    values = {
        **PARAMS,
        "domains": ["search", "factbook"],
        "per_domain": {"search": {}, "factbook": {}},
        "evaluate": {**PARAMS["evaluate"], "models": ["sft", "sft+closed_book"]},
    }
    evaluate.run(StageContext("evaluate", None, parse_params(values), context.root, Tracker()))
    rows = read_rows(context.data / "evaluation" / "rows.parquet")
    turns = {(row["model"], row["domain"]): row["turns"] for row in rows}
    plain, closed = {"search": 6, "factbook": 10}, dict.fromkeys(("search", "factbook"), 1)
    played = (("sft", plain), ("sft+closed_book", closed))
    assert turns == {(model, name): count for model, of in played for name, count in of.items()}
    assert all(row["cost"] == 0.0 for row in rows if row["model"] == "sft+closed_book")
    assert all(len({row["panel"] for row in rows if row["domain"] == name}) == 1 for name in plain)
    evaluation = json.loads((context.reports / "evaluation.json").read_text())
    assert [(item["a"], item["b"], item["domain"], item["n"]) for item in evaluation["comparisons"]] == [
        ("sft+closed_book", "sft", "search", 8),
        ("sft+closed_book", "sft", "factbook", len(tasks)),
    ]
    nobody = {**values, "domains": ["calculator"], "per_domain": {"calculator": {}}}
    with pytest.raises(ParamsError, match=r"sft\+closed_book plays with closed_book: True, and none of calculator has"):
        parse_params(nobody)


def test_models_that_look_ahead_count_what_they_simulate(context: StageContext) -> None:
    """Contract: the tokens of simulated episodes are in the rows, their steps in the report; settings name the model's jobs."""
    values = {**PARAMS, "evaluate": {**PARAMS["evaluate"], "models": ["sft", "sft+search"], "search": {"iterations": 3}}}
    values["evaluate"] |= {"attempts": 1, "scaffold": {"max_turns": 2}}
    evaluate.run(StageContext("evaluate", None, parse_params(values), context.root, Tracker()))
    models = json.loads((context.reports / "evaluation.json").read_text())["models"]
    plain, ahead = models["sft"]["search"], models["sft+search"]["search"]
    assert ahead["tokens"]["mean"] > 2 * plain["tokens"]["mean"]
    assert ahead["environment_steps"] > ahead["turns"]["mean"]
    assert "environment_steps" not in plain
    hashes = {row["policy_hash"] for row in read_rows(context.data / "evaluation" / "rows.parquet")}
    assert len(hashes) == 2
    more = {**values, "evaluate": {**values["evaluate"], "search": {"iterations": 1}}}
    evaluate.run(StageContext("evaluate", None, parse_params(more), context.root, Tracker()))
    assert len(hashes & {row["policy_hash"] for row in read_rows(context.data / "evaluation" / "rows.parquet")}) == 1
    with pytest.raises(ParamsError, match=r"sft\+search needs token ids"):
        parse_params({**values, "resources": {"engine": {"kind": "openai", "text": True, "base_url": "http://127.0.0.1:1/v1"}}})


def demonstration(task_id: str, *contents: str) -> Episode:
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]
    return Episode(f"{task_id}/0", task_id, "search", task_id, 0, "expert", "", 1.0, 1.0, 0, messages=messages)


def test_few_shot_models_see_the_shortest_demonstrations_first(context: StageContext) -> None:
    """Contract: one of each training task, up to its last action, before the task; the panel is that of the plain model."""
    folder = context.data / "curated" / "search"
    tasks = read_tasks(folder / "tasks.parquet")
    test, train = tasks[0], replace(tasks[0], task_id="search-train", split="train")
    write_tasks(folder / "tasks.parquet", [*tasks, train])
    asked = ("find the coin", "look", "a coin", "take coin", "done")
    shown = [
        demonstration(test.task_id, "short"),
        demonstration(train.task_id, *asked),
        demonstration(train.task_id, *asked, "more"),
    ]
    write_episodes(folder / "demonstrations.parquet", shown)
    values = {**PARAMS, "evaluate": {**PARAMS["evaluate"], "models": ["base", "base+few_shot"], "examples": 1}}
    evaluate.run(StageContext("evaluate", None, parse_params(values), context.root, Tracker()))
    chat = Chat(load_policy(context.data / "base").tokenizer)
    prompts: dict[str, list[int]] = {}
    for one in read_rows(context.data / "evaluation" / "episodes.parquet"):
        if one["task_id"] == test.task_id:
            prompts[one["model"]] = [token for token, turn in zip(one["token_ids"], one["turn"], strict=True) if turn < 0]
            question = one["messages"][0]
    assert prompts["base+few_shot"] == chat.encode([*shown[1].messages[:4], question]).token_ids
    assert prompts["base"] == chat.encode([question]).token_ids
    rows = read_rows(context.data / "evaluation" / "rows.parquet")
    assert (len({row["panel"] for row in rows}), len({row["policy_hash"] for row in rows})) == (1, 2)
    panel = load_panels(folder.parent, ["search"])["search"]
    ruled = {"search": replace(panel, environment={"constraint": {"spec": "react"}})}
    with pytest.raises(ValueError, match="the constraint of search would count as its own"):
        plan_jobs(context, ruled, {"base+few_shot": context.data / "base"}, {"base+few_shot": ["search"]})
    text = StageContext(
        *("evaluate", None, parse_params({**values, "evaluate": {**values["evaluate"], "examples_as": "text"}})),
        *(context.root, Tracker()),
    )
    folders, domains = (
        dict.fromkeys(("base", "base+few_shot"), context.data / "base"),
        {"base": ["search"], "base+few_shot": ["search"]},
    )
    planned = {name: jobs[0] for name, jobs in plan_jobs(text, {"search": panel}, folders, domains).items()}
    assert [planned[name].plain for name in folders] == [False, True], "only the demonstrations and what follows them"
    assert planned["base+few_shot"].policy_hash not in {row["policy_hash"] for row in rows}
    many = parse_params({**values, "evaluate": {**values["evaluate"], "examples": 2}})
    with pytest.raises(ValueError, match=r"evaluate\.examples is 2, and .* has demonstrations of 1 training tasks"):
        evaluate.run(StageContext("evaluate", None, many, context.root, Tracker()))


def test_transfer_domains_have_panels_and_no_training(context: StageContext) -> None:
    """Contract: the stage `transfer` freezes the test tasks alone, and every model plays them under the name of their domain;
    choosing settings on validation tasks does not."""
    values = {
        **PARAMS,
        "per_domain": {"search": {}, "calculator": {"curate": {"test": 3}}},
        "evaluate": {**PARAMS["evaluate"], "models": ["sft", "sft+few_shot"], "transfer": ["calculator"], "examples": 1},
    }
    folder = context.data / "curated" / "search"
    tasks = read_tasks(folder / "tasks.parquet")
    write_tasks(folder / "tasks.parquet", [*tasks, replace(tasks[0], task_id="search-train", split="train")])
    write_episodes(folder / "demonstrations.parquet", [demonstration("search-train", "find the coin", "take coin")])
    params = parse_params(values)
    with pytest.raises(FileNotFoundError, match="run 'dvc repro transfer@calculator' first"):
        evaluate.run(StageContext("evaluate", None, params, context.root, Tracker()))
    transfer.run(StageContext("transfer", "calculator", params, context.root, Tracker()))
    frozen = read_tasks(context.data / "transfer" / "calculator" / "tasks.parquet")
    assert [task.split for task in frozen] == ["test"] * 3
    assert json.loads((context.reports / "transfer" / "calculator.json").read_text())["tasks"] == 3
    evaluate.run(StageContext("evaluate", None, params, context.root, Tracker()))
    evaluation = json.loads((context.reports / "evaluation.json").read_text())
    assert {name: sorted(found) for name, found in evaluation["models"].items()} == {
        "sft": ["calculator", "search"],
        "sft+few_shot": ["search"],
    }
    assert evaluation["models"]["sft"]["calculator"]["success"]["n"] == 3
    valid = parse_params({**values, "evaluate": {**values["evaluate"], "models": ["sft"], "split": "valid"}})
    of_valid = [replace(tasks[0], task_id=name, split="valid", cluster=name) for name in ("search-a", "search-b")]
    write_tasks(folder / "tasks.parquet", [*tasks, *of_valid])
    evaluate.run(StageContext("evaluate", None, valid, context.root, Tracker()))
    assert "split" not in evaluation
    evaluation = json.loads((context.reports / "evaluation.json").read_text())
    assert (list(evaluation["panels"]), evaluation["split"]) == (["search"], "valid")


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        (["search"], "evaluate.transfer lists search, which is trained on"),
        (["shop", "shop"], r"evaluate\.transfer.* lists a domain twice"),
        (["shop"], "domain 'shop' has no entry in per_domain"),
    ],
)
def test_wrong_transfer_domains_are_refused(domains: list[str], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        parse_params({**PARAMS, "evaluate": {"transfer": domains}})


@pytest.mark.parametrize("horizon", [{"kind": "fixed", "turns": 1}, {"kind": "scaling_inter", "rounds": [1, 2]}])
def test_evaluation_ignores_the_training_horizon(context: StageContext, horizon: dict[str, Any]) -> None:
    """Contract (ScalingInter-RL): the same weights have the same score whatever limit of turns training has or had."""
    evaluate_section, found = {**PARAMS["evaluate"], "models": ["sft"]}, []
    for rl in ({}, {"horizon": horizon}):
        params = parse_params({**PARAMS, "evaluate": evaluate_section, "rl": {**PARAMS.get("rl", {}), **rl}})
        shutil.rmtree(context.data / "evaluation", ignore_errors=True)
        evaluate.run(StageContext("evaluate", None, params, context.root, Tracker()))
        found.append(outputs(context))
    assert found[0] == found[1]
    limit = load_domain("search", PARAMS["per_domain"]["search"].get("environment", {})).settings.max_turns
    assert max(row["turns"] for row in read_rows(context.data / "evaluation" / "rows.parquet")) == limit > 2


def test_resume_and_shards_write_same_bytes_and_equal_models_play_once(
    context: StageContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: after a kill, or after its shards, the stage writes the same bytes and plays only what is missing. Which models
    are equal is said once, not by each shard."""
    played: list[str] = []

    def counting(job: Any, settings: Settings) -> Any:
        if len(played) == stop_after:
            raise KeyboardInterrupt
        played.append(job.name)
        return play(job, settings)

    monkeypatch.setattr(evaluate, "play", counting)
    stop_after = 100
    evaluate.run(context)
    # Three different models (the merges equal the specialist), 16 episodes each, in jobs of 8.
    assert len(played) == 6
    assert len(read_rows(context.data / "evaluation" / "rows.parquet")) == 5 * 16
    undisturbed = outputs(context)
    assert set(undisturbed) == {"rows.parquet", "evaluation.json", "evaluation.csv", "metrics.json"}
    assert not (context.root / ".bellwether" / "checkpoints" / "evaluate").exists()

    shutil.rmtree(context.data / "evaluation")
    shutil.rmtree(context.reports)
    played, stop_after = [], 2
    with pytest.raises(KeyboardInterrupt):
        evaluate.run(context)
    first, played, stop_after = played, [], 100
    panels_module.unload()
    evaluate.run(context)
    assert len(first) == 2
    assert len(played) == 4
    assert not set(first) & set(played)
    assert outputs(context) == undisturbed

    # Six jobs divided over four shards, run in any order; the stage then plays nothing.
    shutil.rmtree(context.data / "evaluation")
    shutil.rmtree(context.reports)
    by_shard = []
    capsys.readouterr()
    for index in (3, 1, 4, 2):
        played = []
        evaluate.run(replace(context, shard=Shard(index, 4)))
        by_shard.append(len(played))
        assert not (context.data / "evaluation").exists()
    assert "identical" not in capsys.readouterr().err
    played = []
    evaluate.run(context)
    assert "evaluate: merged is identical to rl@search; it is played once\n" in capsys.readouterr().err
    assert (by_shard, played) == ([1, 2, 1, 2], [])
    assert outputs(context) == undisturbed


def evaluate_with(workers: int, root: Path) -> None:
    """Evaluate with this many processes; log the jobs played to `played`."""

    def logging(job: Any, settings: Settings) -> Any:
        with (root / "played").open("a") as file:
            file.write(f"{job.name}\n")
        return play(job, settings)

    evaluate.play = logging
    params = parse_params({**PARAMS, "resources": {**PARAMS["resources"], "workers": workers}})
    context = StageContext("evaluate", None, params, root, Tracker())
    if workers > 1:
        _run_in_forks(context, evaluate.run)
    evaluate.run(context)


def evaluate_in_forks(counts: Sequence[int], root: Path) -> None:
    """Evaluate once with each number of workers; start this in a new process."""
    for library in LIBRARIES:
        import_module(library)
    for count in counts:
        process = get_context("fork").Process(target=evaluate_with, args=(count, root))
        process.start()
        process.join()
        assert process.exitcode == 0
        for name in ("played", "data/evaluation", "reports"):
            (root / str(count) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(root / name, root / str(count) / name)


@pytest.mark.slow
def test_any_number_of_workers_writes_same_bytes(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: forks play all jobs, each once. As in the stage, torch has not computed before: a later fork can hang."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    counts = (1, 2, 3)
    process = get_context("spawn").Process(target=evaluate_in_forks, args=(counts, context.root))
    process.start()
    process.join()
    assert process.exitcode == 0
    names = [sorted((context.root / str(count) / "played").read_text().splitlines()) for count in counts]
    assert names[0] == names[1] == names[2] == sorted(set(names[0]))
    found = [outputs(replace(context, root=context.root / str(count))) for count in counts]
    assert found[0] == found[1] == found[2]
