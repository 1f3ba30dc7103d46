"""Section `merge` of params.yaml and the settings that each method declares."""

from typing import Any

import pytest
from pydantic import ValidationError

from stages.merging import settings
from stages.merging.contract import CHANGE, MergeError
from stages.merging.registry import get_merger, shipped
from stages.merging.settings import Merge
from stages.params import parse_params
from stages.runtime.validation import ParamsError, Section

from .helpers import bound


def params(domains: list[str], **merge: Any) -> Any:
    return parse_params({"domains": domains, "per_domain": {name: {} for name in domains}, "merge": merge})


def test_section_has_the_keys_of_all_shipped_methods() -> None:
    """Contract: a method declares its settings, with ranges and defaults, in its own module alone."""
    for name in shipped():
        for key, field in get_merger(name).Settings.model_fields.items():
            assert (Merge.model_fields[key].default, Merge.model_fields[key].metadata) == (field.default, field.metadata)
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Merge(method="dare", density=1.5)


def test_methods_that_declare_a_key_differently_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Section):
        density: float = 0.9

    monkeypatch.setitem(settings.METHODS, "zz_other", Other)
    with pytest.raises(TypeError, match="zz_other declares the key density"):
        settings.declared()


@pytest.mark.parametrize(
    ("merge", "message"),
    [
        ({"method": "ram", "normalize": True}, "normalize has no effect: it needs method dare or dare_ties or linear or"),
        ({"method": "linear", "lam": 0.5}, r"lam has no effect: .*set it to 1\.0"),
        (
            {"method": "ram_plus", "density": 0.3},
            "density has no effect: it needs method dare or dare_ties or ties; set",
        ),
        ({"method": "distil", "out_dtype": "bfloat16"}, "out_dtype has no effect: it needs a method that merges weights"),
        ({"method": "nonsense"}, "is unknown"),
    ],
)
def test_settings_that_the_method_does_not_read_are_rejected(merge: dict[str, Any], message: str) -> None:
    """Contract: nothing is silently ignored; the error names the key and the methods that read it."""
    with pytest.raises(ParamsError, match=message):
        params(["search"], **merge)


def test_section_of_another_method_may_stay() -> None:
    """Contract: `merge.ram` names its methods, so it may stay in the file while another method is tried."""
    assert params(["search"], method="ties", ram={"eps": 0.01}).merge.method == "ties"


def test_weights_that_the_method_does_not_read_are_rejected() -> None:
    with pytest.raises(ParamsError, match=r"params\.yaml: merge\.weights has no effect with merge\.method slerp"):
        params(["search", "shop"], method="slerp", weights={"shop": 2.0})


def test_method_checks_the_number_of_models() -> None:
    """Contract: a method's own check runs with that of params.yaml."""
    with pytest.raises(ParamsError, match=r"params\.yaml: merge\.method slerp merges exactly two models, .* lists 3"):
        params(["search", "shop", "wordle"], method="slerp")
    with pytest.raises(MergeError, match="exactly two models"):
        bound("slerp", 3)


@pytest.mark.parametrize(("method", "default"), [("linear", True), ("ties", True), ("dare", False), ("task_arithmetic", False)])
def test_normalize_null_is_the_methods_default(method: str, default: bool) -> None:
    assert bound(method, 2).settings.normalized is default
    assert bound(method, 2, normalize=not default).settings.normalized is not default


def test_diagnostics_use_the_methods_threshold() -> None:
    """Contract: the diagnostics count as changed what RAM counts as changed; other methods have no threshold of their own."""
    assert get_merger("ram").change_thresholds(bound("ram", 2, ram={"eps": 0.25}), None) == [0.25, 0.25]
    assert get_merger("ties").change_thresholds(bound("ties", 2), None) == [CHANGE, CHANGE]
