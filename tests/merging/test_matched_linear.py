from pathlib import Path

import pytest
import torch
from by_hand import assert_near
from safetensors.torch import load_file

from stages.merging.contract import MergeError
from stages.merging.methods.ram import RamOptions as Ram
from stages.merging.streaming import merge_folders

from .helpers import bound, merge, random_tensors, write_folder


def test_by_hand() -> None:
    """Contract: RAM+ of [2, 0], [0, 1] is [2, 1], norm sqrt 5; the mean is [1, .5], norm sqrt 1.25; the factor is 2."""
    assert_near(merge("matched_linear", [[2.0, 0.0], [0.0, 1.0]]), [2.0, 1.0])
    # shared 1, unique 1 of the first: l = 1.5; RAM+ [1.5, 2], norm 2.5; mean [.5, 2], norm sqrt 4.25
    factor = 2.5 / 4.25**0.5
    assert_near(merge("matched_linear", [[1.0, 2.0], [0.0, 2.0]], ram=Ram(r=0.5)), [0.5 * factor, 2.0 * factor])


def test_without_changes_it_is_the_base() -> None:
    assert merge("matched_linear", [[1.0], [1.0]], base=[1.0]).tolist() == [1.0]


@pytest.mark.parametrize("eps", [0.5, "30%"])
def test_norm_over_all_tensors_is_that_of_ram_plus(tmp_path: Path, eps: float | str) -> None:
    """Contract: one factor for all tensors gives the merged task vector RAM+'s norm, weights and lam included."""
    shapes = {"a": (30, 4), "b": (50,)}
    paths = [write_folder(tmp_path / str(seed), random_tensors(seed, shapes)) for seed in range(3)]
    norms = {}
    for method in ("ram_plus", "matched_linear"):
        params = bound(method, 2, weights=(1.0, 0.5), lam=0.7, ram={"eps": eps})
        merge_folders(method, paths[:2], paths[2], tmp_path / method, params, seed=0)
        merged, base = load_file(tmp_path / method / "model.safetensors"), load_file(paths[2] / "model.safetensors")
        norms[method] = torch.cat([(merged[name] - base[name]).reshape(-1) for name in shapes]).norm()
    torch.testing.assert_close(norms["matched_linear"], norms["ram_plus"])


def test_overlap_per_tensor_is_refused() -> None:
    with pytest.raises(MergeError, match=r"merge\.ram\.scope must be global"):
        bound("matched_linear", 2, ram={"scope": "tensor"})
