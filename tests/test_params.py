"""params.yaml: nothing is silently ignored, and every error says where the mistake is and how to fix it."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stages import params
from stages.params import Params, check_architecture, check_domains, check_launch, load_params, parse_params
from stages.records.sections import deep_merge, params_hash
from stages.runtime import schema
from stages.runtime.overlay import SCHEMA, overlaid, write_params
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[1]
MINIMAL: dict[str, Any] = {"domains": ["search", "textworld"], "per_domain": {"search": {}, "textworld": {}}}


def test_model_aware_selection_needs_several_attempts() -> None:
    message = error_of(rl={"selection": {"kind": "model_aware"}}, rollout={"attempts": 1})
    assert "per_domain.search: rl.selection.kind: model_aware" in message
    assert "set attempts to at least 2" in message
    parse_params(deep_merge(MINIMAL, {"rl": {"selection": {"kind": "model_aware"}}, "rollout": {"attempts": 8}}))


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
        ({"rl": {"steps": "20"}}, ["rl.steps", "integer", "'20'"]),
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
        ({"rl": {"algorithm": "stored_pg"}, "evaluate": {"models": ["rl@search+value"]}}, "rl.algorithm is stored_pg"),
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


def test_overlay_changes_values_and_keeps_comments(tmp_path: Path) -> None:
    path, overlay = tmp_path / "params.yaml", tmp_path / "overlay.yaml"
    path.write_text("# about the file\nseed: 0 # of everything\nrl:\n  steps: 20 # long\n  epochs: 1\n")
    overlay.write_text("rl: {steps: 2}\nresources: {device: cuda}\n")
    write_params(path, overlaid(path, overlay))
    text = path.read_text()
    assert "# about the file" in text
    assert "# of everything" in text
    assert "# long" in text
    assert yaml.safe_load(text) == {"seed": 0, "rl": {"steps": 2, "epochs": 1}, "resources": {"device": "cuda"}}


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path, Path], tuple[int, str]]:
    """`python -m stages.params --file FILE --apply OVERLAY`: exit code and standard error."""

    def run(path: Path, overlay: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["params", "--file", str(path), "--apply", str(overlay)])
        return params.main(), capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        (b"rl: {stepz: 3}\n", "unknown key 'rl.stepz'. Did you mean 'steps'?"),
        (b"rl: {steps: 0}\n", "greater than or equal to 1"),
        (b"per_domain: {search: {environment: {echo: 1}}}\n", "echo"),
        (b"rl: [\n", "overlay.yaml is not valid YAML"),
        (b"\xff\n", "overlay.yaml, line 1: byte 0xff is not UTF-8"),
        (b"- 1\n", "must hold a mapping"),
        (None, "overlay.yaml can't be read: No such file"),
    ],
)
def test_invalid_overlay_changes_nothing(
    tmp_path: Path, overlay: bytes | None, message: str, applied: Callable[[Path, Path], tuple[int, str]]
) -> None:
    """Contract: `--apply` checks before it writes."""
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    if overlay is not None:
        (tmp_path / "overlay.yaml").write_bytes(overlay)
    code, stderr = applied(path, tmp_path / "overlay.yaml")
    assert code == 2
    assert message in stderr
    assert "params.yaml is unchanged" in stderr
    assert path.read_bytes() == (ROOT / "params.yaml").read_bytes()


def test_overlay_keeps_symlink_and_permissions(tmp_path: Path, applied: Callable[[Path, Path], tuple[int, str]]) -> None:
    real, link, overlay = tmp_path / "real.yaml", tmp_path / "params.yaml", tmp_path / "overlay.yaml"
    shutil.copy(ROOT / "params.yaml", real)
    real.chmod(0o600)
    link.symlink_to(real.name)
    overlay.write_text("rl: {steps: 3}\n")
    assert applied(link, overlay) == (0, "")
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o600
    assert load_params(link).rl.steps == 3
    assert sorted(item.name for item in tmp_path.iterdir()) == ["overlay.yaml", "params.yaml", "real.yaml"]


def test_empty_overlay_changes_nothing(tmp_path: Path) -> None:
    path, overlay = tmp_path / "params.yaml", tmp_path / "overlay.yaml"
    path.write_text("seed: 0 # of everything\n")
    overlay.write_text("# nothing yet\n")
    write_params(path, overlaid(path, overlay))
    assert path.read_text() == "seed: 0 # of everything\n"


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


def test_overlay_changes_only_its_own_lines(tmp_path: Path) -> None:
    """Git's diff after `--apply` is minimal: quotes, nulls and long lines of the shipped file stay as they are."""
    path, overlay = tmp_path / "params.yaml", tmp_path / "overlay.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    overlay.write_text("rl: {algorithm: ppo}\n")
    write_params(path, overlaid(path, overlay))
    before, after = (file.read_text().splitlines() for file in (ROOT / "params.yaml", path))
    assert [line for line in before if line not in after] == ["  algorithm: grpo"]
    assert [line for line in after if line not in before] == ["  algorithm: ppo"]


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


def test_duplicate_key_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("seed: 0\ndomains: [search]\nrl: {steps: 2, steps: 3}\n")
    with pytest.raises(ParamsError, match=r"(?s)params\.yaml.*'steps' is given twice.*line 3"):
        load_params(path)


def test_missing_model_folder_is_reported_by_the_check(tmp_path: Path) -> None:
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(deep_merge(values, {"model": {"path": "data/nope"}})))
    command = [sys.executable, "-m", "stages.params", "--file", str(tmp_path / "params.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "model.path" in done.stderr
    assert "data/nope does not exist" in done.stderr


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


def test_overlay_with_values_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    """ruamel's reader reaches Python's limit before the other reader does."""
    path, overlay = ROOT / "params.yaml", tmp_path / "deep.yaml"
    overlay.write_text(f"rl: {{learning_rate: {'[' * 300}{']' * 300}}}\n")
    with pytest.raises(ParamsError, match=r"deep\.yaml can't be applied to .*: values are nested too deeply"):
        overlaid(path, overlay)


def test_shipped_profiles_change_only_their_sections() -> None:
    changes = {"one-gpu": {"resources", "model"}, "three-domains": {"domains"}, "search-and-code": {"domains", "sft"}}
    changes["seven-domains"] = {"domains", "annotate", "evaluate"}
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


def test_command_line_checks_and_prints(tmp_path: Path) -> None:
    def check(file: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stages.params", "--file", str(file)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    good = check(ROOT / "params.yaml")
    assert good.returncode == 0, good.stderr
    assert "per_domain.search:" in good.stdout
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["per_domain"]["search"]["environment"] = {"max_turn": 3}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(values))
    bad = check(tmp_path / "bad.yaml")
    assert bad.returncode == 2
    assert "max_turn" in bad.stderr
    assert "Traceback" not in bad.stderr
    values["domains"], values["per_domain"]["serch"] = ["serch"], {}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(values))
    unknown = check(tmp_path / "bad.yaml")
    assert unknown.returncode == 2
    assert "unknown domain 'serch'; did you mean 'search'?" in unknown.stderr


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


def test_explain_shows_fields_defaults_and_readers() -> None:
    found = schema.explain_key(params.Params, "rl.loss", ROOT)
    assert "stages/algorithms/parts/loss.py" in found
    assert "clip_high: number > 0, ≤ 10; default 0.2" in found
    assert "Needs loss.kind: ppo_clip, turn_clip, gspo or cispo." in found
    assert "clip_high" in schema.explain_key(params.Params, "per_domain.search.rl.loss", ROOT)
    one = schema.explain_key(params.Params, "annotate.selection.c", ROOT)
    assert "read by the stages annotate" in one
    assert "stages/annotation/selection.py" in one
    assert "prior_temperature" not in one
    for key, near in (("rl.los", "'loss'"), ("rl.steps.more", "no keys of its own"), ("what", "Known here")):
        with pytest.raises(ParamsError, match=near):
            schema.explain_key(params.Params, key, ROOT)


def test_file_of_an_earlier_release_is_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: the error for an old file gives the new names and the command, which renames keys, moves sections, removes
    nested defaults, keeps what the user set and the keys that DVC needs, and reports it; a second run changes nothing."""
    path = tmp_path / "params.yaml"
    old = load_params().model_dump()
    old["rl"]["filling"] = {**old["rl"].pop("group_resampling"), "kind": "resample"}
    old["per_domain"]["search"]["rl"]["filling"] = {"kind": "exclude"}
    old["sft"]["warmup"], old["design"] = 0.25, {"budget": 9}
    path.write_text("# mine\n" + yaml.safe_dump(old, sort_keys=False))
    lines = len(path.read_text().splitlines())
    with pytest.raises(ParamsError) as error:
        load_params(path)
    assert "'rl.filling'. It is now 'rl.group_resampling'" in str(error.value)
    assert "'design'. It is now the file reports/design/design.yaml" in str(error.value)
    assert "python -m stages.params --migrate" in str(error.value)
    monkeypatch.setattr(sys, "argv", ["params", "--file", str(path), "--migrate"])
    assert params.main() == 0
    message = capsys.readouterr().out
    assert "renamed rl.filling to rl.group_resampling" in message
    assert "renamed per_domain.search.rl.filling" in message
    assert "removed annotate.selection.rule: uct, the default" in message
    text, made = path.read_text(), load_params(path)
    assert text.startswith(f"{SCHEMA}# mine\n")
    assert len(text.splitlines()) < lines / 2
    assert (made.sft.warmup, made.rl.group_resampling.kind) == (0.25, "resample")
    assert made.section("rl", "search").group_resampling.kind == "exclude"
    changed = deep_merge(load_params().model_dump(), {"sft": {"warmup": 0.25}, "rl": {"group_resampling": {"kind": "resample"}}})
    changed = deep_merge(changed, {"per_domain": {"search": {"rl": {"group_resampling": {"kind": "exclude"}}}}})
    assert made == parse_params(changed)
    assert yaml.safe_load((tmp_path / "reports/design/design.yaml").read_text()) == {"budget": 9}
    written = yaml.safe_load(text)
    assert written["model"].keys() >= {"path", "max_length", "lora", "thinking"}
    assert written["resources"].keys() >= {"device", "launch", "engine"}
    assert params.main() == 0
    assert path.read_text() == text
    assert "is up to date" in capsys.readouterr().out
