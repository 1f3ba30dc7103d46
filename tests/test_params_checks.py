"""params.yaml: nothing is silently ignored, and every error says where the mistake is and how to fix it."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.params import check_architecture, check_domains, check_launch, load_params, parse_params
from stages.records.sections import deep_merge
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[1]
MINIMAL: dict[str, Any] = {"domains": ["search", "textworld"], "per_domain": {"search": {}, "textworld": {}}}


def test_model_aware_selection_needs_several_attempts() -> None:
    message = error_of(rl={"selection": {"kind": "model_aware"}}, rollout={"tasks": 96, "attempts": 1})
    assert "per_domain.search: rl.selection.kind: model_aware" in message
    assert "set attempts to at least 2" in message
    parse_params(deep_merge(MINIMAL, {"rl": {"selection": {"kind": "model_aware"}}, "rollout": {"tasks": 96, "attempts": 8}}))


def error_of(**changes: Any) -> str:
    with pytest.raises(ParamsError) as error:
        parse_params(deep_merge(MINIMAL, changes))
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "key", "near"),
    [
        ({"mergee": {}}, "mergee", "merge"),
        ({"rl": {"learning_rat": 1e-4}}, "rl.learning_rat", "learning_rate"),
        ({"annotate": {"selection": {"rul": "uct"}}}, "annotate.selection.rul", "rule"),
        ({"merge": {"metod": "ties"}}, "merge.metod", "method"),
        ({"model": {"lora": {"rang": 8}}}, "model.lora.rang", "rank"),
        ({"per_domain": {"search": {"enviroment": {}}}}, "per_domain.search.enviroment", "environment"),
        ({"per_domain": {"search": {"rl": {"stepz": 1}}}}, "rl.stepz", "steps"),
        ({"rl": {"Steps": 3}}, "rl.Steps", "steps"),
        ({"rl": {"clip_high": 0.3}}, "rl.clip_high", "rl.loss.clip_high"),
        ({"per_domain": {"search": {"rl": {"clip_high": 0.3}}}}, "rl.clip_high", "rl.loss.clip_high"),
        ({"rl": {"algorithm": "pacs", "settings": {"Beta": 1}}}, "rl.settings.Beta", "beta"),
        ({"rl": {"algorithm": "PPO"}}, "rl.algorithm 'PPO'", "ppo"),
        ({"domains": ["Search"]}, "domain 'Search' has no entry in per_domain (did you mean 'search'?); add", "search"),
    ],
)
def test_unknown_key_is_rejected_with_the_nearest_name(changes: dict, key: str, near: str) -> None:
    message = error_of(**changes)
    assert key in message
    assert f"'{near}'" in message


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rl": {"steps": 0}}, ["rl.steps", "greater than or equal to 1", "0"]),
        ({"rl": {"steps": "many"}}, ["rl.steps", "integer", "many"]),
        ({"rl": {"steps": "20"}}, ["rl.steps", "integer", "(given: '20', which YAML reads as text; write 20)"]),
        ({"rl": {"steps": "1e2"}}, ["(given: '1e2', which YAML reads as text; write 100)"]),
        ({"rl": {"steps": "2.5"}}, ["(given: '2.5')"]),
        ({"rl": {"learning_rate": "3e-4"}}, ["valid number (given: '3e-4', which YAML reads as text; write 0.0003)"]),
        ({"rl": {"learning_rate": "1e-5"}}, ["(given: '1e-5', which YAML reads as text; write 1.0e-05)"]),
        ({"rl": {"learning_rate": "nan"}}, ["(given: 'nan')"]),
        ({"rl": {"advantage": "mean"}}, ["'rl.advantage' must be a mapping of keys (given: 'mean')"]),
        ({"seed": True}, ["seed", "integer", "True"]),
        ({"resources": {"device": "gpu7"}}, ["resources.device", "cuda", "gpu7"]),
        ({"curate": {"noise": 1.5}}, ["curate.noise", "less than or equal to 1", "1.5"]),
        ({"evaluate": {"confidence": 95}}, ["evaluate.confidence", "less than 1", "95"]),
        ({"merge": {"method": "tis"}}, ["merge.method", "'ties'", "tis"]),
        ({"rollout": {"sampling": {"top_p": 0}}}, ["rollout.sampling.top_p", "greater than 0"]),
        ({"merge": {"weights": {"search": -1}}}, ["merge.weights.search", "greater than 0"]),
        ({"model": {"lora": {"rank": -1}}}, ["model.lora.rank", "greater than or equal to 0"]),
        ({"model": {"lora": {"targets": "all"}}}, ["model.lora.targets", "'all-linear'", "list"]),
    ],
)
def test_invalid_value_is_rejected_with_its_range(changes: dict, parts: list[str]) -> None:
    message = error_of(**changes)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rl": {"algorithm": "rloo", "group_size": 1}}, "group_size must be at least 2"),
        ({"rl": {"minibatches": 99}}, "whole groups"),
        ({"rl": {"algorithm": "grpoo"}}, "did you mean 'grpo'?"),
        ({"rl": {"critic": {"learning_rate": 0.01}}}, "it needs a method with a critic"),
        ({"rl": {"algorithm": "dpo", "loss": {"clip_high": 0.3}}}, "learns from preference pairs"),
        ({"annotate": {"value_model": {"head": {"v_min": 1.0, "v_max": 0.0}}}}, "v_min"),
        ({"domains": ["search", "search"]}, "twice"),
        ({"domains": ["search", "webshop"]}, "'webshop' has no entry in per_domain"),
        ({"domains": ["search"], "merge": {"method": "slerp"}}, "slerp merges exactly two models"),
        ({"merge": {"weights": {"chess": 1.0}}}, "chess"),
        ({"evaluate": {"models": ["sft+r"]}}, "each also with +q, +value, +logprob"),
        ({"evaluate": {"models": ["sft+value"]}}, "rl.algorithm is grpo: set it to b_coder"),
        (
            {"rollout": {"tasks": 96}, "rl": {"algorithm": "stored_pg"}, "evaluate": {"models": ["rl@search+value"]}},
            "rl.algorithm is stored_pg",
        ),
        ({"evaluate": {"models": ["sft+q"]}}, "annotate.q_model.kind is none: set it to step_dpo"),
        ({"evaluate": {"models": ["sft+logprob"], "sampling": {"temperature": 0.0}}}, "draws the same one each time"),
        ({"evaluate": {"models": ["sft+logprob"], "sampling": {"top_k": 1}}}, "draws the same one each time"),
        (
            {"evaluate": {"models": ["sft+logprob"]}, "resources": {"engine": {"kind": "openai", "text": True}}},
            "sft+logprob needs token ids and log-probabilities",
        ),
    ],
)
def test_invalid_combination_is_rejected_with_the_reason(changes: dict, reason: str) -> None:
    assert reason in error_of(**changes)


def test_all_mistakes_are_reported_at_once() -> None:
    message = error_of(rl={"steps": 0, "epoch": 1}, sft={"epochs": -1})
    assert len(message.splitlines()) == 3


def test_per_domain_section_overrides_only_its_keys() -> None:
    values = deep_merge(MINIMAL, {"rl": {"steps": 9, "loss": {"kl_coef": 0.1}}})
    values = deep_merge(values, {"per_domain": {"search": {"rl": {"loss": {"clip_low": 0.3}, "steps": 5}}}})
    params = parse_params(values)
    search, textworld = params.section("rl", "search"), params.section("rl", "textworld")
    assert (search.steps, search.loss.clip_low, search.loss.kl_coef) == (5, 0.3, 0.1)
    assert (textworld.steps, textworld.loss.model_fields_set, textworld.loss.kl_coef) == (9, {"kl_coef"}, 0.1)


def test_override_with_an_invalid_combination_is_rejected() -> None:
    message = error_of(per_domain={"search": {"rl": {"group_size": 1}}})
    assert "per_domain.search" in message
    assert "group_size must be at least 2" in message


def test_missing_or_broken_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="does not exist"):
        load_params(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("domains: [a\n")
    with pytest.raises(ParamsError, match="not valid YAML"):
        load_params(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("- 1\n")
    with pytest.raises(ParamsError, match="mapping"):
        load_params(tmp_path / "params.yaml")


ODD = ["seed: 2024-13-45", "seed: !!timestamp a", "seed: !!bool a", "seed: !!int a", "seed: " + "9" * 5000, "x: " + "[" * 1500]
ODD += ["? [a, b]\n: c", "1: 2", "rl: &a {x: *a}", "x: !!binary abc%", "<<: 3", "x: !!python/object:os.system {}", "x: \x01"]


@pytest.mark.parametrize("line", ODD)
def test_odd_yaml_is_rejected_with_a_message(tmp_path: Path, line: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(f"{yaml.safe_dump(MINIMAL)}{line}\n")
    with pytest.raises(ParamsError, match=r"params\.yaml"):
        load_params(path)


def test_randomly_edited_files_are_read_or_rejected(tmp_path: Path) -> None:
    """Contract: no edit of params.yaml, of text or of bytes, ends in a traceback."""
    path, whole = tmp_path / "params.yaml", (ROOT / "params.yaml").read_bytes()
    edits = random.Random(0)
    rejected = 0
    for _ in range(60):
        data = bytearray(whole)
        place = edits.randrange(len(data))
        data[place : place + edits.randrange(2)] = bytes([edits.randrange(256)])
        path.write_bytes(data)
        try:
            load_params(path)
        except ParamsError:
            rejected += 1
    assert rejected > 10


def test_invalid_utf8_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(b"seed: 0\nrl: {}\n# caf\xe9\n")
    with pytest.raises(ParamsError, match=r"params\.yaml, line 3: byte 0xe9 is not UTF-8; save the file as UTF-8"):
        load_params(path)


def test_duplicate_key_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("seed: 0\ndomains: [search]\nrl: {steps: 2, steps: 3}\n")
    with pytest.raises(ParamsError, match=r"(?s)params\.yaml.*'steps' is given twice.*line 3"):
        load_params(path)


def test_unsupported_model_is_reported_by_the_check(tmp_path: Path) -> None:
    """Contract: `python -m stages.params` rejects models that no engine here supports, without reading the weights."""
    params = parse_params({"domains": ["search"], "per_domain": {"search": {}}, "model": {"path": "t5"}})
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5/config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ParamsError, match=r"params.yaml: model.path: .*t5.*is not supported: it has an encoder"):
        check_architecture(params, tmp_path)
    longer = parse_params({"domains": ["search"], "per_domain": {"search": {}}, "model": {"max_length": 2048}})
    with pytest.raises(ParamsError, match="max_length is 2048, but the model's max_position_embeddings is 1024"):
        check_architecture(longer, ROOT)


def test_unlisted_domains_are_checked_like_listed_ones() -> None:
    """Contract: a mistake in per_domain is reported whether or not its domain is listed; environment settings, like all others,
    accept no `true` or "3" as a number."""
    bad: list[tuple[str, dict, str]] = [
        ("code", {"environment": {"levels": {2: True}}}, r"'per_domain\.code\.environment' levels\.2 must be a number, not True"),
        ("code", {"environment": {"rewards": {"pass": True}}}, r"rewards\.pass must be a number, not True"),
        ("code", {"environment": {"instructions": 1}}, "instructions must be true or false, not 1"),
        ("search", {"environment": {"max_turns": "3"}}, "max_turns must be a number, not '3'"),
        ("search", {"environment": {"max_turn": 3}}, "unknown key 'per_domain.search.environment.max_turn'"),
        ("serch", {}, "unknown domain 'serch'; did you mean 'search'"),
        ("search", {"curate": {"trian": 3}}, "in per_domain.search: unknown key 'curate.trian'"),
    ]
    for name, section, words in bad:
        for listed in (["textworld"], [name]):
            values = {"domains": listed, "per_domain": {"textworld": {}, name: section}}
            with pytest.raises(ParamsError, match=words):
                check_domains(parse_params(values))
    good = {"environment": {"levels": {"1": 1, 2: 0.5}, "rewards": {"pass": 1, "fail": -0.5}, "kinds": ["word"]}}
    check_domains(parse_params({"domains": ["textworld"], "per_domain": {"textworld": {}, "code": good}}))


def test_fsdp_with_archer_is_rejected_when_sft_starts(tmp_path: Path) -> None:
    """Contract: what rl does not support under resources.launch is found before anything trains; FSDP allows other critics."""
    (tmp_path / "split.yaml").write_text("distributed_type: FSDP\n")
    (tmp_path / "copies.yaml").write_text("distributed_type: MULTI_CPU\n")

    def check(launch: str | None, algorithm: str) -> None:
        check_launch(
            parse_params(deep_merge(MINIMAL, {"resources": {"launch": launch}, "rl": {"algorithm": algorithm}})), tmp_path
        )

    for launch, algorithm in (("split.yaml", "ppo"), ("copies.yaml", "archer"), (None, "archer")):
        check(launch, algorithm)
    with pytest.raises(ParamsError, match=r"resources.launch: split.yaml.* use profiles/accelerate/ddp.yaml"):
        check("split.yaml", "archer")
    with pytest.raises(ParamsError, match=r"none\.yaml does not exist"):
        check("none.yaml", "grpo")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"model": {"lora": {"rank": 8}}}, "model.lora"),
        ({"rl": {"sparse": {"share": 0.5}}}, "rl.sparse"),
        ({"rl": {"warm_start": {"algorithm": "tree_bc"}}}, "rl.warm_start"),
    ]
    for more, named in changes:
        params = parse_params(deep_merge(MINIMAL, {"resources": {"launch": "split.yaml"}, "annotate": {"tasks": 48}, **more}))
        with pytest.raises(ParamsError, match=rf"resources.launch: split.yaml.*{named}.*use profiles/accelerate/ddp.yaml"):
            check_launch(params, tmp_path)


@pytest.mark.parametrize(
    ("constraint", "more", "message"),
    [
        ({}, {"resources": {"engine": {"kind": "vllm"}}}, "masks tokens, which resources.engine.kind vllm can't"),
        ({}, {"evaluate": {"scaffold": {"think": "plan"}}}, "evaluate.scaffold.think adds turns"),
        ({"renormalise": False}, {"rl": {"sampling": {"top_k": 8}}}, "no update knows how likely a token was"),
        ({"renormalise": False}, {"rl": {"sampling": {"top_p": 0.9}}}, "no update knows how likely a token was"),
    ],
)
def test_a_constraint_must_fit_what_draws_and_trains(constraint: dict, more: dict, message: str) -> None:
    own = {"per_domain": {"search": {"environment": {"constraint": {"spec": "react", **constraint}}}}, "domains": ["search"]}
    params = parse_params(deep_merge(deep_merge(yaml.safe_load((ROOT / "params.yaml").read_text()), own), more), "params.yaml")
    with pytest.raises(ParamsError, match=re.escape(message)):
        check_domains(params)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ({"domains": ["serch"], "regex": "x"}, "report.patterns.own.domains: serch is not among domains and evaluate.transfer"),
        ({"predicate": "nomod:f"}, "report.patterns.own.predicate: nomod:f can't be imported"),
    ],
)
def test_patterns_are_checked_before_anything_runs(pattern: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=re.escape(message)):
        check_domains(parse_params(deep_merge(MINIMAL, {"report": {"patterns": {"own": pattern}}})))
