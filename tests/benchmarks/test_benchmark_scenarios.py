"""Every scenario on tiny sizes: our side always, the other side where it is installed."""

from __future__ import annotations

import importlib.util
import shutil
import sqlite3
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import (
    control,
    engine_limit,
    gemma,
    generate_ragged,
    lifecycle,
    mcts,
    merge,
    nodes,
    off_policy,
    profiles,
    rl_iteration,
    rollout_multi_turn,
    sandbox,
    scaling,
    search_domain,
    side_by_side,
    startup,
    tracking,
    train_step,
    workers,
)
from benchmarks.measure import Options, Sample
from benchmarks.models import forwarded_per_unit, load, make_model
from benchmarks.processes import Layout, apart
from benchmarks.toy import FRAME, ToyChat, text_of
from stages.sandbox.probe import fault


@pytest.fixture(scope="module")
def tasks(options: Options) -> search_domain.SearchTasks:
    return search_domain.search_tasks(options, search_domain.weights(options))


def test_texts_have_the_requested_number_of_tokens(options: Options):
    _, tokenizer = load(make_model(options, "tiny"), "sdpa")
    chat = ToyChat(tokenizer)
    for count in (1, 7, 40):
        text = text_of(tokenizer, count, "test", count)
        assert len(chat.observation_tokens(text)) == len(chat.prompt_tokens(text)) == count + FRAME


def test_ragged_lengths_have_the_stated_mean_and_maximum():
    table = generate_ragged.lengths(256)
    assert max(table) == generate_ragged.MOST * generate_ragged.MEAN
    assert sum(table) / len(table) == pytest.approx(generate_ragged.MEAN, rel=0.01)
    assert table == generate_ragged.lengths(256)


def test_our_rollouts(options: Options):
    """Contract: prompts are prefilled once per group, histories never again."""
    work = rollout_multi_turn.work(options)
    side = apart(partial(rollout_multi_turn.ours, options, "tiny", work), Layout(2, 1))
    assert side.run() == work.action_tokens
    assert forwarded_per_unit(side) > 1
    side.close()


@pytest.mark.slow
@pytest.mark.usefixtures("_with_trl")
def test_trl_rollouts(options: Options):
    """Contract: TRL's tool loop plays the same turns of the same lengths, also in two accelerate processes together."""
    work = rollout_multi_turn.work(options)
    assert rollout_multi_turn.theirs(options, "tiny", work).run() == work.action_tokens
    side = apart(partial(rollout_multi_turn.theirs, options, "tiny", work), Layout(2, 1, distributed=True))
    assert side.run() == work.action_tokens
    side.close()


def test_generation_on_both_sides(options: Options):
    table = [3, 1, 5, 2]
    assert generate_ragged.ours(options, "tiny", table, 2).run() == 11
    assert generate_ragged.theirs(options, "tiny", table, rows=2).run() == 11


@pytest.mark.usefixtures("_with_trl")
def test_training_steps_of_both_sides_agree(options: Options):
    """Contract: both sides' loss and gradients agree before times are compared."""
    mine = train_step.Ours(options, "tiny", 24, 8, 2, 2)
    other = train_step.Theirs(options, "tiny", mine, 2)
    loss, _ = gradient = mine.gradient()
    assert loss != 0
    train_step.check(train_step.disagreement(gradient, other.gradient()), "here")
    halves = train_step.Theirs(options, "tiny", mine, 2, accumulate=2)
    train_step.check(train_step.disagreement(gradient, halves.gradient()), "in two micro-batches")
    pair = apart(
        lambda team: train_step.Theirs(options, "tiny", train_step.Ours(options, "tiny", 24, 8, 2, 2), 2, 2, team=team).side(),
        Layout(2, 1, distributed=True),
    )
    train_step.check(train_step.disagreement(gradient, train_step.combined(pair.facts())), "in two processes")
    pair.close()
    team = apart(lambda team: train_step.Ours(options, "tiny", 24, 8, 2, 2, team=team).side(), Layout(2, 1))
    train_step.check(train_step.disagreement(gradient, train_step.combined(team.facts())), "by a team", tolerance=0.0)
    team.close()
    assert mine.run() == other.run() == 1
    pairs = zip(mine.model.parameters(), other.trainer.model.parameters(), strict=True)
    distance = torch.cat([(one - two).detach().abs().flatten() for one, two in pairs])
    # Adam's first step is the gradient's sign, which rounding decides where the gradient is almost 0.
    assert (distance > 0.2 * train_step.LEARNING_RATE).float().mean() < 0.01


def test_disagreeing_training_step_raises():
    gradient = {"w": torch.ones(4)}
    difference = train_step.disagreement((1.0, gradient), (1.0, {"w": torch.tensor([1.0, 1.0, 1.0, 1.001])}))
    assert difference["gradient"] == pytest.approx(0.0005, rel=1e-3)
    with pytest.raises(train_step.DisagreementError, match="cannot be compared"):
        train_step.check(difference, "here")


def test_our_training_step(options: Options):
    assert train_step.Ours(options, "tiny", 24, 8, 2, 2).run() == 1


def test_bare_loop_matches_a_full_forward_pass(options: Options):
    """Contract: the limit is that of the same model: the last logits equal those of a full forward pass."""
    model, _ = load(make_model(options, "tiny"), "sdpa")
    side = engine_limit.limit(model, 2, 3, "sdpa")
    seen = []
    hook = model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output))
    side.before()
    assert side.run() == 6
    hook.remove()
    ids = torch.tensor(engine_limit.prompts(2, model.config.vocab_size))
    whole = model(input_ids=torch.cat([ids, ids[:, :3]], 1)).logits[:, -1]
    torch.testing.assert_close(seen[-1], whole, rtol=1e-4, atol=1e-5)
    mine = engine_limit.ours(options, "tiny", 2, 3)
    mine.before()
    assert mine.run() == 6


def test_prompts_read_on_both_sides(options: Options):
    """Contract: both sides read the same tokens, also of a model with windows and heads of another size."""
    half, tokens = replace(options, precision="bfloat16"), sum(map(len, gemma.texts(4, 8)))
    assert gemma.reading(half, "270m-tiny", 4, 8).run() == tokens
    assert gemma.forward(half, "270m-tiny", 4, 8).run() == tokens
    mine = engine_limit.ours(half, "270m-tiny", 2, 3)
    mine.before()
    assert mine.run() == 6


def test_tree_search_on_both_sides(options: Options, tasks: search_domain.SearchTasks):
    assert mcts.ours(options, tasks, 1).run() > 0
    assert mcts.theirs(options, tasks, 1).run() > 0


def test_annotation_parts_sum_to_the_total(options: Options):
    """Contract: the parts add up to the time of annotate, which makes trees, labels and a value model."""
    (row,) = mcts.annotation(options)
    assert (row["tasks"], row["iterations"]) == (4, 2)
    assert row["labels"] >= row["tasks"], "at least the roots"
    assert row["steps"] > row["tasks"]
    assert min(row[part] for part in mcts.PARTS) > 0
    assert sum(row[part] for part in mcts.PARTS) == pytest.approx(row["seconds"], rel=0.01)


@pytest.mark.slow
def test_our_rl_iteration(options: Options, tasks: search_domain.SearchTasks):
    """Contract: two processes do the work of one."""
    sides = [apart(partial(rl_iteration.ours, options, tasks), Layout(count, 1)) for count in (1, 2)]
    assert [side.run() for side in sides] == [1, 1]
    (alone,), pair = (side.facts() for side in sides)
    assert alone["action_tokens"] > 0
    assert pair == [alone, alone]
    for side in sides:
        side.close()


def test_weights_are_restored():
    model = torch.nn.Linear(2, 2)
    before, back = [parameter.detach().clone() for parameter in model.parameters()], rl_iteration.restore(model)
    torch.nn.init.zeros_(model.weight)
    back()
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


@pytest.mark.usefixtures("_with_trl")
def test_trl_rl_iteration(options: Options, tasks: search_domain.SearchTasks):
    """Contract: TRL plays the search environment within its limits of turns and tokens."""
    side, rl = rl_iteration.theirs(options, tasks), rl_iteration.section(options, tasks)
    assert side.run() == 1
    most = rl.tasks_per_step * rl.group_size * tasks.domain.settings.max_turns * rl.sampling.max_tokens
    assert 0 < side.facts()["action_tokens"] <= most


def test_rewards_come_from_the_environment(options: Options, tasks: search_domain.SearchTasks):
    make = rl_iteration.tool_environment(tasks)
    task = tasks.tasks[0]
    right, wrong = make(), make()
    right.reset(task_id=task.task_id)
    wrong.reset(task_id=task.task_id)
    assert right.act(f"search {task.spec['start']}")
    completions = [[{"role": "assistant", "content": text}] for text in (f"answer {task.spec['answer']}", "answer nobody")]
    assert rl_iteration.reward(completions, [right, wrong]) == [1.0, 0.0]


@pytest.mark.slow
def test_merges_of_both_sides_agree(options: Options):
    """Contract: the merged models agree before times are compared."""
    folder = options.scratch / "merge"
    folders = merge.make_models(options, merge.SMALL, folder)
    try:
        merge.drop_page_cache(folders)
        measured = merge.run_once(options, "ours", "ties", folders, keep=True)
        assert measured["wall_s"] > 0
        assert measured["peak_rss_bytes"] >= measured["peak_anonymous_bytes"] > 0
        if importlib.util.find_spec("mergekit") is None:
            pytest.skip("mergekit is not installed; pip install -e .[bench]")
        merge.run_once(options, "theirs", "ties", folders, keep=True)
        assert merge.difference("ties", folders) <= merge.TOLERANCE
        shutil.rmtree(merge.merged_folder(folders, "theirs"))
        shutil.copytree(folders[1], merge.merged_folder(folders, "theirs"))
        with pytest.raises(merge.DisagreementError, match="cannot be compared"):
            merge.difference("ties", folders)
    finally:
        shutil.rmtree(folder)


def test_startup_scenarios(options: Options):
    (result,) = startup.stage_help(options).values()
    assert result.summary()["theirs"] == startup.HELP_LIMIT_S
    for scenario in (startup.noop_repro, startup.noop_lifecycle, workers.measure, side_by_side.measure, nodes.measure):
        with pytest.raises(startup.SkippedError, match="not a DVC checkout"):
            scenario(Options(options.scratch, options.scratch))


def test_side_by_side_runs_the_lifecycles_stages_in_their_order(options: Options, monkeypatch: pytest.MonkeyPatch):
    """Contract: from rollout to evaluate, each item once, after what it needs; with two workers two at a time."""
    needs = side_by_side.graph(options.root)
    assert {item.partition("@")[0] for item in needs} == set(side_by_side.STAGES)
    assert set(needs["rl@search"]) == {"rollout@search", "annotate@search"}
    running, done, most = set[str](), list[str](), [0]

    def stage(command: list[str], folder: Path) -> tuple[Sample, str]:
        item = "@".join(part.removeprefix("stages.") for part in command[2:] if part != "--domain")
        assert set(needs[item]) <= set(done)
        running.add(item)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(item)
        done.append(item)
        return Sample(1.0, 0.02, 0.0), ""

    monkeypatch.setattr(side_by_side, "run", stage)
    for jobs in (1, 2):
        del done[:], most[1:]
        assert side_by_side.play(needs, options.scratch, jobs).wall > 0.02 * len(needs) / jobs
        assert sorted(done) == sorted(needs)
        assert max(most) == jobs


@pytest.mark.slow
def test_tracking_overhead(options: Options):
    results = tracking.measure(options)
    assert list(results) == ["tracking_stage_seconds", "tracking_outage_seconds"]
    for result in results.values():
        assert result.summary()["theirs"] == tracking.LIMIT_S
    with sqlite3.connect(options.scratch / "tracked" / "mlflow.db") as store:
        assert store.execute("SELECT COUNT(*) FROM runs WHERE name = 'rl@search'").fetchone() == (1,)
        (points,) = store.execute("SELECT COUNT(*) FROM metrics WHERE key LIKE 'metric%'").fetchone()
    assert points == results["tracking_stage_seconds"].notes["points"]


@pytest.mark.slow
def test_scaling_tables(options: Options):
    assert [row["slots"] for row in scaling.rollouts(options)] == [1, 2]
    assert [row["tokens"] for row in scaling.steps(options)] == [48, 96]


@pytest.mark.slow
def test_profile_shares_sum_to_one(options: Options):
    rows = profiles.measure(options)
    assert [row.pop("scenario").split("@")[0] for row in rows] == ["rollout_multi_turn", "mcts", "rl_iteration", "train_step_p16"]
    for row in rows:
        assert list(row) == [*profiles.PARTS, profiles.REST]
        assert sum(row.values()) == pytest.approx(1.0, abs=0.01)
        assert row["weight products"] > 0
    assert rows[-1]["backward pass"] > 0


def test_call_belongs_to_the_first_matching_part():
    times = {
        "<method 'run_backward' of 'torch._C._EngineBase' objects>": 4.0,
        "<built-in method torch._C._nn.linear>": 2.0,
        "<built-in method torch.matmul>": 1.0,
        "<method 'copy_' of 'torch._C.TensorBase' objects>": 1.0,
        "advance": 2.0,
    }
    found = profiles.shares(times)
    assert {part: share for part, share in found.items() if share} == {
        "backward pass": 0.4,
        "weight products": 0.2,
        "attention": 0.1,
        "moving tensors": 0.1,
        "python": 0.2,
    }


def test_stage_times_are_those_of_the_last_finished_run(tmp_path):
    with pytest.raises(startup.SkippedError, match="make lifecycle"):
        lifecycle.recorded(tmp_path)
    with sqlite3.connect(tmp_path / lifecycle.STORE) as store:
        store.execute("CREATE TABLE runs (name, run_uuid, status, start_time, end_time)")
        store.execute("CREATE TABLE tags (run_uuid, key, value)")
        store.execute("CREATE TABLE latest_metrics (run_uuid, key, value)")
        rows = [
            ("rollout@search", "a", "FINISHED", 1000, 3000),
            ("rollout@search", "b", "FINISHED", 5000, 9500),
            ("rollout@search", "c", "RUNNING", 9900, None),
            ("lifecycle 12", "d", "FINISHED", 0, 9000),
            ("rollout@search", "e", "FINISHED", 9800, 9800),
        ]
        store.executemany("INSERT INTO runs VALUES (?, ?, ?, ?, ?)", rows)
        store.execute(
            "INSERT INTO tags VALUES ('b', 'git.commit', 'abc'), ('b', 'dvc.state', 'ran'), ('e', 'dvc.state', 'cached')"
        )
        store.executemany(
            "INSERT INTO latest_metrics VALUES (?, ?, ?)",
            [("b", "speed/sampled_tokens_per_s", 10), ("b", "speed/fed_tokens_per_s", 25)],
        )
    assert lifecycle.recorded(tmp_path) == {
        "seconds": {"rollout@search": 4.5},
        "commits": {"rollout@search": "abc"},
        "fed_per_sampled_token": {"rollout@search": 3.5},
    }


@pytest.mark.slow
def test_sandbox_on_both_sides(options: Options):
    """Contract: the warm server and one bubblewrap per program give the same result for every program."""
    if missing := fault("bubblewrap"):
        with pytest.raises(startup.SkippedError, match="bubblewrap"):
            sandbox.measure(options)
        pytest.skip(f"bubblewrap: {missing}")
    results = sandbox.measure(options)
    assert set(results) == {"sandbox_programs", "sandbox_start"}
    assert results["sandbox_programs"].summary()["unit"] == "programs/s"
    assert results["sandbox_programs"].ours[0].amount == 5


def test_off_policy_updates_and_steps(options: Options):
    """Contract: both sides have the same number of weights and the same values, and do as many updates as they count."""
    pytest.importorskip("stable_baselines3")
    for kind in ("updates", "steps"):
        ours, theirs, apart = off_policy.sides(options, kind)
        assert (ours.run(), theirs.run()) == (20.0, 20.0)
        assert apart < off_policy.APART


def test_updates_of_dqn_and_ppo(options: Options, monkeypatch: pytest.MonkeyPatch):
    """Contract: as for soft actor-critic; PPO's iterations have 20 updates of 256 steps."""
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(control, "FILLED", 100)
    sides = (control.deep_q(options), control.on_policy(options, "updates"), control.on_policy(options, "steps"))
    for (ours, theirs, distance), count in zip(sides, (20.0, 20.0, 256.0), strict=True):
        assert (ours.run(), theirs.run()) == (count, count)
        assert distance < control.APART


def test_off_policy_without_the_alternative_is_skipped(options: Options, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(startup.SkippedError, match=r"pip install 'bellwether\[control\]'"):
        off_policy.theirs(options)
    with pytest.raises(startup.SkippedError, match=r"pip install 'bellwether\[control\]'"):
        control.measure(options)
