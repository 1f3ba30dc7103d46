"""The lifecycle with profiles, in a copy of the checkout: `python -m flows.profile gemma-270m [one-gpu ...]`.

.bellwether/profiles/<names> is a clone of the last commit that shares DVC's cache, so params.yaml, dvc.lock and the results of
the checkout stay as they are. Imports below data/raw that are not in git are copied there. The model is made there if it comes
from a package, the profiles are applied in order, and the lifecycle runs; an interrupted run continues where it stopped. The
results are copied to reports/profiles/<names>.json. With `--model`, only the model is made, in the checkout itself: `make claims
PROFILE=gemma-270m` runs the board's experiments on it.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.pipeline import read_settings, sources
from flows.process import BAD_PARAMETERS, ROOT, StageFailedError, capture, python_environment, quoted, run_supervised
from stages.runtime.command import command
from stages.runtime.files import atomic_bytes, atomic_folder, atomic_text, locked

COPIES = Path(".bellwether") / "profiles"
RESULTS = Path("reports") / "profiles"
RAW = "data/raw"
PRETRAINED = "data/pretrained/"
"""Models below it are made by `python -m stages.exchange gguf NAME`, NAME being the folder's."""
CONVERTER = Path("stages") / "exchange" / "gguf.py"


def overlays(root: Path, names: Sequence[str]) -> list[Path]:
    """The files of the profiles. Raises StageFailedError for an unknown one."""
    known = sorted(path.stem for path in (root / "profiles").glob("*.yaml"))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise StageFailedError(f"unknown profile '{name}'{hint} Known: {', '.join(known)}", BAD_PARAMETERS)
    return [root / "profiles" / f"{name}.yaml" for name in names]


def _git(folder: Path, *arguments: str) -> str:
    done = capture(["git", *arguments], folder)
    if done.returncode:
        raise StageFailedError(f"git {arguments[0]} failed in {folder}: {done.stderr.strip()}")
    return done.stdout.strip()


def clone(root: Path, folder: Path) -> None:
    """Make `folder` a clone of the last commit of `root`, or bring it there. It uses the DVC cache of `root`, from which DVC
    restores what a stage made before from the same inputs."""
    if not folder.exists():
        cache = capture([sys.executable, "-m", "dvc", "cache", "dir"], root)
        if cache.returncode:
            raise StageFailedError(f"dvc cache dir failed in {root}: {cache.stderr.strip()}")
        with atomic_folder(folder) as partial:
            _git(root, "clone", "-q", "--shared", "--no-checkout", str(root), str(partial))
            atomic_text(partial / ".dvc" / "config.local", f"[cache]\n    dir = {root / cache.stdout.strip()}\n")
    commit = _git(root, "rev-parse", "HEAD")
    if not (folder / "params.yaml").exists() or _git(folder, "rev-parse", "HEAD") != commit:
        _git(folder, "fetch", "-q", "origin", "HEAD")
        _git(folder, "checkout", "-q", "--force", "--detach", commit)


def _imports(root: Path) -> list[str]:
    return _git(root, "ls-files", "-z", "--others", RAW).split("\0")[:-1]


def copy_imports(root: Path, folder: Path) -> None:
    """Copy the files below data/raw that are not in git, ignored or not; remove those that `root` lacks."""
    wanted = {name: (root / name).read_bytes() for name in _imports(root)}
    for name in _imports(folder):
        if name not in wanted:
            (folder / name).unlink()
    for name, content in wanted.items():
        if not (folder / name).exists() or (folder / name).read_bytes() != content:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_bytes(folder / name, content)


def run(arguments: list[str], folder: Path) -> None:
    """Run Python in `folder`. Raises StageFailedError."""
    code, tail = run_supervised(arguments, folder, python_environment(), lambda line: print(line, flush=True))
    if code:
        raise StageFailedError(f"'python {' '.join(arguments)}' failed in {folder}:{quoted(tail)}", code)


def apply(folder: Path, profiles: Sequence[Path]) -> None:
    """Write the committed params.yaml with `profiles` over it. Raises StageFailedError."""
    _git(folder, "checkout", "-q", "HEAD", "--", "params.yaml")
    for profile in profiles:
        run(["-m", "stages.params", "--apply", str(profile)], folder)


def make_models(folder: Path, profiles: Sequence[Path]) -> None:
    """Make the pretrained models that the profiles name, unless this converter has made them. Raises StageFailedError."""
    converter = hashlib.sha256((folder / CONVERTER).read_bytes()).hexdigest()
    for profile in profiles:
        path = str((read_settings(profile).get("model") or {}).get("path", ""))
        if not path.startswith(PRETRAINED):
            continue
        # Outside the model's folder, so that another converter that makes the same bytes runs no stage again.
        made, record = folder / path, folder / ".bellwether" / "converters" / Path(path).name
        with locked(record.with_name(f"{record.name}.lock"), wait=True):  # two experiments on a profile may start at a time
            if made.exists() and record.exists() and record.read_text(encoding="utf-8") == converter:
                continue
            new = f"{path}.new"
            shutil.rmtree(folder / new, ignore_errors=True)
            run(["-m", "stages.exchange", "gguf", Path(path).name, "--to", new], folder)
            shutil.rmtree(made, ignore_errors=True)
            (folder / new).rename(made)
            atomic_text(record, converter)


def lifecycle(names: Sequence[str], folder: Path) -> None:
    """Run the lifecycle with the profiles in `folder`. Raises StageFailedError."""
    unknown = ("ls-files", "--others", "--exclude-standard", "--", *sources(ROOT), f":!{RAW}")
    if _git(ROOT, "status", "--porcelain", "--untracked-files=no") or _git(ROOT, *unknown):
        print("profile: the last commit is run, without the uncommitted changes", file=sys.stderr)
    clone(ROOT, folder)
    copy_imports(ROOT, folder)
    files = overlays(folder, names)
    make_models(folder, files)
    apply(folder, files)
    run(["-m", "flows.pipeline"], folder)


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.profile", description=__doc__.split("\n")[0])
    parser.add_argument("profiles", nargs="+", metavar="PROFILE", help="a file in profiles/, without .yaml")
    parser.add_argument("--model", action="store_true", help="only make the profiles' models, in this checkout")
    options = parser.parse_args()
    names = options.profiles
    folder, result = ROOT / COPIES / "+".join(names), ROOT / RESULTS / f"{'+'.join(names)}.json"
    try:
        files = overlays(ROOT, names)
        if options.model:
            make_models(ROOT, files)
            return 0
        with locked(folder.with_name(f"{folder.name}.lock"), wait=False) as alone:
            if not alone:
                raise StageFailedError(f"{folder.name} already runs in {folder}; wait until it has finished, or end it")
            lifecycle(names, folder)
        result.parent.mkdir(parents=True, exist_ok=True)
        atomic_bytes(result, (folder / "reports" / "evaluation.json").read_bytes())
    except StageFailedError as error:
        print(f"profile: {error}", file=sys.stderr)
        return BAD_PARAMETERS if error.bad_parameters else 1
    print(f"profile: results are in {result.relative_to(ROOT)}, the report is {folder.relative_to(ROOT)}/reports/report.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
