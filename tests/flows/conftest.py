"""A small DVC project with the lifecycle's shape: a matrix stage, and one that joins it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DVC_YAML = """
stages:
  join:
    cmd: cat made/*.txt > joined.txt
    deps: [made]
    params: [domains]
    outs: [joined.txt]
  make:
    matrix: {domain: "${domains}"}
    cmd: mkdir -p made && echo ${item.domain} ${scale} > made/${item.domain}.txt
    deps: [source.txt]
    params: [scale]
    outs: ["made/${item.domain}.txt"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    (tmp_path / "params.yaml").write_text("domains: [a, b]\nscale: 1\n")
    (tmp_path / "source.txt").write_text("source\n")
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path
