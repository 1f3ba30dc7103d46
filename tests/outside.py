"""Outside packages, installed as editable in a separate folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "0.1"
dependencies = [{requires}]
[project.entry-points]
{points}
[tool.setuptools]
packages = ["{module}"]
"""
SITE = "import os, site\nsite.addsitedir(os.path.join(os.path.dirname(__file__), 'site'))\n"


def write_package(folder: Path, name: str, points: Mapping[str, str], requires: str = "", code: str = "SIZE = 3\n") -> None:
    """Write the source of a distribution with one package of the same name. `points`: group -> entry point in TOML."""
    module = name.replace("-", "_")
    (folder / name / module).mkdir(parents=True)
    (folder / name / module / "__init__.py").write_text(code)
    (folder / name / module / "words.txt").write_text("north south\n")
    listed = "\n".join(f'"{group}" = {{ {point} }}' for group, point in points.items())
    text = PROJECT.format(name=name, module=module, points=listed, requires=requires)
    (folder / name / "pyproject.toml").write_text(text)


def install_editable(folder: Path, *names: str) -> None:
    """Install packages of `write_package` as editable, for interpreters that have `folder` on PYTHONPATH."""
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    sources = [item for name in names for item in ("--editable", str(folder / name))]
    install = [sys.executable, "-m", "pip", "install", *options, "--prefix", str(folder / "prefix"), *sources]
    subprocess.run(install, check=True, capture_output=True, text=True)
    (made,) = (folder / "prefix").glob("lib*/python*/site-packages")
    (folder / "site").symlink_to(made)
    (folder / "sitecustomize.py").write_text(SITE)


def python_path(*folders: Path) -> str:
    return os.pathsep.join(map(str, folders))
