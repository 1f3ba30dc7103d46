"""Methods with roles, priced tools, guidance, evolving instructions or constraints train by what docs/ tells a user to apply, on
the tiny profile. A random model plays, so that this is about running, not about learning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT, Checkout

from stages.agent.chat import Chat
from stages.agent.policy import load_tokenizer
from stages.params import Params, load_params
from stages.records.episode import EPISODE_SCHEMA, episode_row, read_episodes, read_rows, write_table
from stages.runtime.overlay import overlaid, write_params
from stages.runtime.stage import StageContext

pytestmark = [pytest.mark.timeout(600)]

PROFILES = ("agent_rlvr", "inspo", "reseek", "router_r1", "ssp", "ssrl", "marft")
"""Files of profiles/methods, each named as the method that it sets."""
VARIANTS = {**dict(zip(PROFILES, PROFILES, strict=True)), "marft_token": "marft", "echo": "", "opsd": "", "grpo": "ltl_spec"}
"""Method -> its profile; "": it needs no setting but its name. GRPO is the default run's, here under a constraint: ReAct."""
LONG = ("echo", "marft_token", "opsd", "reseek", "router_r1", "ssrl")
"""Methods whose mechanisms others here share; they run with --slow."""
PLAY = {"sampling": {"max_tokens": 8}}
RL = {**PLAY, "steps": 3, "tasks_per_step": 3, "group_size": 3}
SIZES: dict[str, Any] = {
    "resources": {"workers": 1},
    "model": {"max_length": 4096},
    "sft": {"demonstrations": 20},
    "rollout": {**PLAY, "attempts": 2},
    "rl": RL,
    "per_domain": {"search": {"curate": {"train": 10}, "rollout": PLAY, "annotate": {}, "rl": RL}},
}
"""The tiny profile's, where a method's profile has others, and room for its tokenizer, which knows few words."""
OF_PAIRS = ("agent_rlvr",)
"""Methods of pairs: they keep no episodes, need successes, and have no entropy bonus, which the tiny profile sets."""
ROLES = {"ssp": {"proposer", "solver"}, "marft": {"planner", "solver"}, "marft_token": {"planner", "solver"}}
"""Roles that speak in the kept episodes."""
STREAMS = {"echo": "ledger/observation_tokens_trained", "grpo": "ledger/forced_tokens_untrained"}
"""Tokens that only this method or constraint counts."""


@pytest.fixture(scope="module")
def base(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose base model reads sequences of the SIZES' max_length; its positions are rotary, without weights."""
    checkout = Checkout.make(tmp_path_factory.mktemp("profiles") / "run", source)
    config = checkout.root / "data" / "base" / "config.json"
    longest = {"max_position_embeddings": SIZES["model"]["max_length"]}
    config.write_text(json.dumps({**json.loads(config.read_text()), **longest}))
    return checkout


def variant(base: Checkout, original: str, method: str) -> Params:
    path = base.root / "params.yaml"
    path.write_text(original)
    if profile := VARIANTS[method]:
        write_params(path, overlaid(path, ROOT / "profiles" / "methods" / f"{profile}.yaml"))
    base.edit({**SIZES, "domains": ["search"]})
    if method not in PROFILES and method != "grpo":
        base.edit({"rl": {"algorithm": method}})
    if method in OF_PAIRS:
        base.edit({"rl": {"loss": {"entropy_coef": None}}})
    return load_params(path)


def stage(base: Checkout, name: str, params: Params) -> None:
    from stages import curate, rl, rollout, sft

    tracker: Any = SimpleNamespace(**dict.fromkeys(("params", "metric", "artifact", "episodes"), lambda *_, **__: None))
    run = {"curate": curate.run, "sft": sft.run, "rollout": rollout.run, "rl": rl.run}[name]
    run(StageContext(name, None if name == "sft" else "search", params, base.root, tracker))


def plant_successes(root: Path) -> None:
    """Replace one of rollout's attempts at each task, which all fail, with the expert's."""
    folder, chat = root / "data" / "rollouts" / "search", Chat(load_tokenizer(root / "data" / "models" / "sft"))
    demonstrations = read_episodes(root / "data" / "curated" / "search" / "demonstrations.parquet")
    shown = {episode.task_id: episode for episode in demonstrations if episode.reward}
    rows = []
    for played in read_episodes(folder / "episodes.parquet"):
        if (expert := shown.pop(played.task_id, None)) is not None:
            told = chat.encode(expert.messages)
            spans = zip(expert.turns, told.spans, strict=True)
            turns = [replace(turn, start=start, end=end) for turn, (start, end) in spans]
            same = {name: getattr(played, name) for name in ("episode_id", "group_id", "policy_hash", "temperature")}
            tokens = {"token_ids": told.token_ids, "owner": told.owner, "turn": told.turn, "logprob": [0.0] * len(told.turn)}
            played = replace(expert, **same, **tokens, turns=turns)
        rows.append(episode_row(played))
    write_table(folder / "episodes.parquet", EPISODE_SCHEMA, rows)


@pytest.mark.parametrize("method", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in VARIANTS])
def test_method_trains_by_its_profile(base: Checkout, original: str, made: dict[str, str], method: str) -> None:
    """Contract: the rl stage of each runs on outputs of the stages before it, trains tokens of the policy and no others, and
    writes weights, a report and episodes."""
    params, key = variant(base, original, method), ""
    for name in ("curate", "sft", "rollout"):
        own = params.sft if name == "sft" else params.section(name, "search")
        key += repr([own, params.model, params.per_domain["search"].environment])
        if made.get(name) != key:
            stage(base, name, params)
            made[name] = key
    if method in OF_PAIRS:
        plant_successes(base.root)
        made.pop("rollout")
    stage(base, "rl", params)
    report = json.loads((base.root / "reports" / "rl" / "search.json").read_text())
    assert report["algorithm"] == method
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["ledger/policy_tokens_trained"] + report["ledger/policy_tokens_dropped"] > 0
    assert (base.root / "data" / "models" / "rl" / "search" / "tokenizer.json").exists()
    rows = read_rows(base.root / "data" / "rl" / "search" / "samples.parquet")
    assert {row.get("role") or "" for row in rows} == ROLES.get(method, set() if method in OF_PAIRS else {""})
    counted = {name for name in STREAMS.values() if report.get(name)}
    assert counted == {STREAMS[method]} if method in STREAMS else not counted
