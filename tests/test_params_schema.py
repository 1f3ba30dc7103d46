"""Keys of params.yaml: defaults, the shipped file and profiles, hashes, and their schema and documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stages import params
from stages.environments.registry import settings_of
from stages.params import Params, parse_params
from stages.records.sections import deep_merge, params_hash
from stages.runtime import schema
from stages.runtime.overlay import SCHEMA
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[1]


def test_shipped_file_has_defaults_and_is_short() -> None:
    """Contract: an absent key means its default; a file with every key means the same."""
    text = (ROOT / "params.yaml").read_text()
    values = yaml.safe_load(text)
    shipped = parse_params(values)
    assert shipped == parse_params({key: values[key] for key in ("domains", "per_domain")})
    everything = shipped.model_dump()
    assert params_hash(parse_params(everything)) == params_hash(shipped) != params_hash(values)
    assert all(parse_params(everything).section("rl", domain) == shipped.section("rl", domain) for domain in shipped.domains)
    assert len(text.splitlines()) <= 120


def test_shipped_profiles_change_only_their_sections() -> None:
    changes = {"one-gpu": {"resources", "model"}, "three-domains": {"domains"}, "search-and-code": {"domains", "sft"}}
    changes["seven-domains"] = {"domains", "evaluate"}
    changes["transfer-bank"] = {"evaluate"}
    # Another model: its budgets, never the methods that are compared by default.
    changes["gemma-270m"] = changes["gemma-270m-gpu"] = {*Params.model_fields} - {"seed"}
    for path in sorted((ROOT / "profiles").glob("*.yaml")):
        overlay = yaml.safe_load(path.read_text())
        assert set(overlay) <= changes[path.stem], path
        assert "method" not in overlay.get("merge", {}), path
        parse_params(deep_merge(yaml.safe_load((ROOT / "params.yaml").read_text()), overlay))


def test_params_hash_ignores_order_but_no_value() -> None:
    one, other = {"a": 1, "b": {"c": 2}}, {"b": {"c": 2}, "a": 1}
    assert params_hash(one) == params_hash(other) != params_hash({**one, "a": 2})


def test_hash_has_settings_of_a_method_s_task_source() -> None:
    """A method chooses the source; its settings shape the run all the same."""
    reward = {"kind": "environment"}
    one, other = ({"reward": reward, "tasks": {"source": None, "settings": {"size": size}}} for size in (1, 2))
    assert params_hash(one) != params_hash(other)
    assert params_hash({"reward": reward, "tasks": {"source": "static", "settings": {}}}) == params_hash({"reward": reward})


def test_key_of_a_later_release_changes_the_hash_only_if_set() -> None:
    """Contract: settings without the new key keep the hash of earlier outputs."""
    settings: list[dict[str, Any]] = [{}, {"warmup_updates": 0}, {"warmup_updates": 5}]
    hashes = [params_hash({"rl": {"replay": {"tau": 0.1, **added}}}) for added in settings]
    assert hashes[0] == hashes[1] != hashes[2]


JSON = st.recursive(
    st.integers() | st.text(max_size=3), lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=3), max_leaves=8
)
MAPPING = st.dictionaries(st.text(max_size=2), JSON, max_size=3)


@given(MAPPING, MAPPING)
def test_deep_merge_prefers_the_upper_layer(lower: dict, upper: dict) -> None:
    merged = deep_merge(lower, upper)
    assert set(merged) == set(lower) | set(upper)
    assert deep_merge(merged, upper) == merged
    assert deep_merge(lower, {}) == lower


def test_schema_and_params_page_are_up_to_date() -> None:
    """Contract: both are written by `make docs` from the sections' fields and docstrings."""
    assert (ROOT / "params.schema.json").read_text(encoding="utf-8") == schema.json_schema(params.Params), "run make docs"
    assert (ROOT / "docs" / "params.md").read_text(encoding="utf-8") == schema.page(params.Params), "run make docs"
    assert (ROOT / "params.yaml").read_text(encoding="utf-8").startswith(SCHEMA)


def test_every_key_is_documented() -> None:
    for place, section in schema.sections(params.Params):
        lacking = [key.name for key in schema.keys(section, place) if not key.text and key.inner is None]
        assert not lacking, f"{place}: no docstring for {', '.join(lacking)}"


def test_json_schema_accepts_valid_and_rejects_unknown_keys() -> None:
    """Contract: the schema accepts what the sections accept, including null for values that a method chooses."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(json.loads((ROOT / "params.schema.json").read_text(encoding="utf-8")))
    shipped = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    for values in (shipped, json.loads(json.dumps(parse_params(shipped).model_dump()))):
        assert [error.message for error in validator.iter_errors(values)] == []
    for change in ({"rl": {"loss": {"clip_hi": 1}}}, {"per_domain": {"search": {"rl": {"stepz": 1}}}}, {"seed": -1}):
        assert list(validator.iter_errors(deep_merge(shipped, change)))


def explain(key: str) -> str:
    return schema.explain_key(params.Params, key, ROOT, settings_of)


def test_explain_shows_fields_defaults_and_readers() -> None:
    found = explain("rl.loss")
    assert "stages/algorithms/parts/loss.py" in found
    assert "clip_high: number > 0, ≤ 10; default 0.2" in found
    assert "Needs loss.kind: ppo_clip, turn_clip, gspo or cispo." in found
    assert "clip_high" in explain("per_domain.search.rl.loss")
    one = explain("annotate.selection.c")
    assert "read by the stages annotate" in one
    assert "stages/annotation/selection.py" in one
    assert "prior_temperature" not in one
    own = explain("per_domain.search.rl.steps")
    assert "read by the stages rl\n" in own
    for key in ("per_domain.search.environment", "per_domain.search.environment.echo_query"):
        found = explain(key)
        assert "read by the stages curate, transfer, rollout, annotate, rl\n" in found
        assert "defined in stages/environments/search/domain.py\n" in found
        assert re.search(r"\n  echo_query: .*\n      [A-Z]", found)
    assert "hops" not in found
    assert "\n  max_turns: " in explain("per_domain.search.environment")
    assert "Overrides of `rl`" in explain("per_domain.search")
    for key, near in (
        ("per_domain.search.rll", "'rl'"),
        ("per_domain.search.environment.max_turn", "max_turns"),
        ("per_domain.serch.environment.max_turns", "'search'"),
        ("rl.los", "'loss'"),
        ("rl.steps.more", "no keys of its own"),
        ("what", "Known here"),
        ("clip_high", r"'rl\.loss\.clip_high'"),
        ("rl.clip_high", r"'rl\.loss\.clip_high'"),
    ):
        with pytest.raises(ParamsError, match=near):
            explain(key)
