"""The merge stage on tiny Llama models, without DVC and MLflow."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages import merge
from stages.merging.streaming import MergeResult, silent
from stages.params import Params

from .helpers import bound

RESULT = MergeResult(tensors=1, entries=1, totals=None)

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def save_llama(path: Path, seed: int, base: dict[str, torch.Tensor] | None = None, tied: bool = False) -> dict[str, torch.Tensor]:
    """A one-layer Llama with tokenizer and chat template; `base` plus a sparse change where `base` is given."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    if base is not None:
        model.load_state_dict({name: value + 0.1 * (torch.rand_like(value) < 0.2) for name, value in base.items()})
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "user:": 1, "go": 2, "<eos>": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return {name: value.clone() for name, value in model.state_dict().items()}


class _Context(SimpleNamespace):
    @contextmanager
    def progress(self, label: str, total: int, unit: str = "step") -> Iterator[Any]:
        with silent(label, total, unit) as bar:
            yield bar


def context(root: Path, domains: list[str], **settings: Any) -> Any:
    params = Params(domains=domains, merge=settings, per_domain={name: {} for name in domains})
    logged: dict[str, Any] = {}
    return _Context(
        params=params,
        domain=None,
        root=root,
        data=root / "data",
        reports=root / "reports",
        log_params=logged.update,
        metric=lambda name, value, step=None: logged.update({name: value}),
        artifact=lambda path: logged.update({"artifact": path}),
        logged=logged,
    )


def specialists(root: Path, domains: list[str], tied: bool = False) -> None:
    base = save_llama(root / "data/models/sft", 0, tied=tied)
    for number, domain in enumerate(domains):
        save_llama(root / "data/models/rl" / domain, number + 1, base, tied)


@pytest.mark.parametrize("tied", [False, True])
def test_merged_model_loads_with_from_pretrained(tmp_path: Path, tied: bool) -> None:
    """Contract: data/models/merged loads by AutoModelForCausalLM and its chat template renders; tied embeddings stay tied."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    specialists(tmp_path, ["one", "two"], tied)
    used = context(tmp_path, ["one", "two"])
    merge.run(used)
    for name in ("merged", "merged_linear"):
        folder = tmp_path / "data/models" / name
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert bool(torch.isfinite(model(torch.tensor([[1, 2]])).logits).all())
        text = AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "go"}], tokenize=False)
        assert text == "user: go\n"
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "data/models" / name) for name in ("rl/one", "rl/two", "merged_linear")
    ]
    weights = [model.model.norm.weight for model in models]
    torch.testing.assert_close(weights[2], (weights[0] + weights[1]) / 2)


def test_report_describes_merge_and_is_reproducible(tmp_path: Path) -> None:
    """Contract: reports/merge.json has method, resolved parameters and diagnostics, no paths; a second run writes the same."""
    specialists(tmp_path, ["one", "two"])
    used = context(tmp_path, ["one", "two"], weights={"two": 2.0})
    merge.run(used)
    first = (tmp_path / "reports/merge.json").read_bytes()
    merge.run(used)
    assert (tmp_path / "reports/merge.json").read_bytes() == first
    assert str(tmp_path).encode() not in first
    report = json.loads(first)
    assert (report["method"], report["base"], report["parameters"]["weights"]) == ("ram_plus", "sft", [1.0, 2.0])
    assert report["parameters"]["ram"]["scope"] == "global"
    assert 0.1 < report["diagnostics"]["models"]["one"]["changed_fraction"] < 0.3
    scan = report["scan"]["one"]
    assert scan["shared"] + scan["unique"] == report["diagnostics"]["models"]["one"]["changed"]
    assert scan["enlargement"] == pytest.approx(1.0 + 0.1 * min(scan["shared"] / scan["unique"], 1.0))
    assert report["distance_to_linear"] > 0
    assert used.logged["changed_fraction.one"] == report["diagnostics"]["models"]["one"]["changed_fraction"]
    assert not list((tmp_path / "data/models").glob(".*"))


def test_method_settings_do_not_affect_linear_average(tmp_path: Path) -> None:
    """Contract: merged_linear is the plain weighted mean whatever merge.lam and merge.normalize are."""
    specialists(tmp_path, ["one", "two"])
    merge.run(context(tmp_path, ["one", "two"]))
    plain = (tmp_path / "data/models/merged_linear/model.safetensors").read_bytes()
    merge.run(context(tmp_path, ["one", "two"], method="ties", lam=0.5, normalize=False))
    assert (tmp_path / "data/models/merged_linear/model.safetensors").read_bytes() == plain


def test_merge_of_one_domain_is_its_specialist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: with a single domain the merge is its specialist, bit for bit, and the stage says that no method was used."""
    specialists(tmp_path, ["one"])
    merge.run(context(tmp_path, ["one"], weights={"one": 0.3}, lam=0.5))
    specialist = (tmp_path / "data/models/rl/one/model.safetensors").read_bytes()
    assert (tmp_path / "data/models/merged/model.safetensors").read_bytes() == specialist
    report = json.loads((tmp_path / "reports/merge.json").read_text())
    assert (report["method"], report["requested"]) == ("linear", "ram_plus")
    assert "merge: one is the only domain, so merge.method ram_plus is not used\n" in capsys.readouterr().err


def test_base_setting_selects_base_model_for_deltas(tmp_path: Path) -> None:
    """Contract: merge.base `base` takes deltas against model.path, a folder below the root."""
    specialists(tmp_path, ["one", "two"])
    save_llama(tmp_path / "data/base", 0)
    used = context(tmp_path, ["one", "two"], method="task_arithmetic", base="base")
    assert merge.base_folder(used) == tmp_path / "data/base"
    merge.run(used)
    same = (tmp_path / "data/models/merged/model.safetensors").read_bytes()
    merge.run(context(tmp_path, ["one", "two"], method="task_arithmetic"))
    assert (tmp_path / "data/models/merged/model.safetensors").read_bytes() == same


def diagnosed(**shares: float) -> dict[str, Any]:
    """Diagnostics of models that changed these shares of their weights."""
    return {
        "models": {name: {"changed_fraction": share, "sparsity": 0.0} for name, share in shares.items()},
        "pairs": [],
        "groups": [],
    }


def test_eps_above_most_changes_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: the warning names the domain, the share of changes kept and the parameter, and no domain that changed enough."""
    merge.remarks("ram_plus", bound("ram_plus", 2), RESULT.totals, diagnosed(search=0.0004, textworld=0.6))
    warning = capsys.readouterr().err
    assert "rl@search" in warning
    assert "0.0%" in warning
    assert "lower it" in warning
    assert "textworld" not in warning


def test_methods_without_eps_do_not_warn_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: only RAM has eps."""
    merge.remarks("ties", bound("ties", 1), RESULT.totals, diagnosed(search=0.0))
    assert capsys.readouterr().err == ""
