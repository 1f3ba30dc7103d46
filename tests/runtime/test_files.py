"""Files and folders are written atomically, everywhere in stages/ and flows/."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from source_imports import ROOT, source_files

from stages.runtime import files
from stages.runtime.files import atomic_bytes, atomic_file, atomic_files, atomic_folder, atomic_text

WRITERS = frozenset(
    (
        *("write_text", "write_bytes", "to_csv", "to_parquet", "savefig", "save_pretrained", "save_file", "write_table"),
        *("copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "save", "savez", "savetxt", "dump", "touch"),
    )
)
"""Names of functions and methods that write a file."""
COPIERS = frozenset(("copy", "move", "save", "dump", "write_table"))
"""Those of WRITERS that count only as functions of MODULES; elsewhere the name means other things."""
MODULES = frozenset(("shutil", "torch", "np", "numpy", "json", "pickle", "pq", "yaml_io"))
ATOMIC = ("atomic_file", "atomic_files", "atomic_folder")
EXEMPT = {
    "flows/auth.py auth_string": "created under a lock, with its mode from the start",
    "flows/compare.py write": "rows in a scratch folder",
    "flows/overrides.py _check": "a scratch folder",
    "flows/overrides.py check_overrides": "a scratch folder",
    "flows/serve.py start": "a process's log, read by people only",
    "stages/environments/textworld/games.py _compiled": "a scratch folder",
    "stages/runtime/workspace.py copy_of": "a checkout that is renamed into place when complete",
    "stages/runtime/workspace.py _link": "a copy of the checkout, completed if something is missing",
    "stages/runtime/workspace.py update_code": "a copy of the checkout, compared with it before each use",
    "stages/runtime/workspace.py link_tree": "a copy of the checkout, completed if something is missing",
    "stages/designs/evaluations.py fill_workspace": "a copy of the checkout, completed if something is missing",
    "stages/reporting/site/sources.py gather": "what Sphinx reads, made anew for each build",
    "stages/sandbox/probe.py breaches": "bait for a program in the sandbox, in a folder that is removed",
    "stages/tracking/spool.py end_killed": "appends a line end to a file of lines",
    "stages/tracking/__init__.py register_model": "a scratch folder, copied by _keep",
}
"""`file function` -> why its writes need not be atomic."""


def interrupted(block: AbstractContextManager[Path], write: Callable[[Path], object]) -> None:
    """Call `write` inside `block`, then fail."""

    def run() -> None:
        with block as partial:
            write(partial)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


def test_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "report.json"
    atomic_text(path, "one\n")
    assert path.read_bytes() == b"one\n"
    interrupted(atomic_file(path), lambda partial: partial.write_text("half of tw"))
    assert path.read_text() == "one\n"
    atomic_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert [item.name for item in path.parent.iterdir()] == ["report.json"]


def test_folder_is_replaced_atomically(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for name in ("config.json", "weights/part"):
        with atomic_folder(folder) as partial:
            assert not list(partial.iterdir())
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_text(name)
        assert [str(item.relative_to(folder)) for item in folder.rglob("*") if item.is_file()] == [name]
    interrupted(atomic_folder(folder), lambda partial: (partial / "half").write_text(""))
    assert (folder / "weights" / "part").exists()
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_files_of_a_folder_are_for_those_who_may_read_the_folder(tmp_path: Path) -> None:
    """Contract: a file that a library made for its owner alone is read by whoever reads the folder; programs stay programs."""
    with atomic_folder(tmp_path / "model") as partial:
        for name, mode in (("weights", 0o600), ("run", 0o700)):
            (partial / name).touch(mode=mode)
        partial.chmod(0o755)
    assert [(tmp_path / "model" / name).stat().st_mode & 0o777 for name in ("weights", "run")] == [0o644, 0o744]


def test_several_files_are_replaced_and_others_kept(tmp_path: Path) -> None:
    atomic_text(tmp_path / "dvc.yaml", "kept")
    atomic_text(tmp_path / "model", "old")
    with atomic_files(tmp_path) as partial:
        for name in ("model", "tokenizer"):
            (partial / name).write_text("new")
        assert (tmp_path / "model").read_text() == "old"
    assert {item.name: item.read_text() for item in tmp_path.iterdir()} == {
        "dvc.yaml": "kept",
        "model": "new",
        "tokenizer": "new",
    }
    interrupted(atomic_files(tmp_path), lambda partial: (partial / "model").write_text("newer"))
    assert (tmp_path / "model").read_text() == "new"
    assert not (tmp_path / ".partial").exists()


def test_leftovers_of_a_killed_process_do_not_block_writes(tmp_path: Path) -> None:
    """After a kill between two renames or during a write, the next write succeeds and removes what was left."""
    for name in ("a.partial", "b.old.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").write_text("")
    (tmp_path / "b.partial").write_text("left")
    atomic_text(tmp_path / "a", "whole")
    with atomic_folder(tmp_path / "b") as partial:
        (partial / "whole").write_text("")
    assert sorted(item.name for item in tmp_path.rglob("*")) == ["a", "b", "whole"]


def test_data_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the rename must not leave a file of zeros: the file is flushed first, then the folder's new entry."""
    done: list[str] = []
    fsync, rename = os.fsync, os.replace

    def seen_fsync(handle: int) -> None:
        done.append(f"flush {Path(os.readlink(f'/proc/self/fd/{handle}')).relative_to(tmp_path)}")
        fsync(handle)

    def seen_rename(source: Path, target: Path) -> None:
        done.append(f"rename {Path(source).name}")
        rename(source, target)

    monkeypatch.setattr(files.os, "fsync", seen_fsync)
    monkeypatch.setattr(files.os, "replace", seen_rename)
    atomic_text(tmp_path / "a", "text")
    assert done == ["flush a.partial", "rename a.partial", "flush ."]
    done.clear()
    with atomic_folder(tmp_path / "b") as partial:
        (partial / "inside").write_text("text")
    assert done == ["flush b.partial/inside", "flush b.partial", "rename b.partial", "flush ."]
    done.clear()
    atomic_text(tmp_path / "c", "text", durable=False)
    assert done == ["rename c.partial"]


KILLED = """
import os, signal, sys
from stages.runtime.files import atomic_file
with atomic_file(sys.argv[1]) as partial, partial.open("w") as handle:
    handle.write("new, incomplete")
    handle.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_during_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST, list[ast.AST]]]:
    """(function, node, enclosing nodes) of all nodes."""

    def walk(node: ast.AST, name: str, around: list[ast.AST]) -> Iterator[tuple[str, ast.AST, list[ast.AST]]]:
        yield name, node, around
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = node.name
        for child in ast.iter_child_nodes(node):
            yield from walk(child, name, [*around, node])

    yield from walk(tree, "<module>", [])


def root_name(node: ast.AST) -> str:
    """`partial` of `(partial / "config.json").open`, "" where there is no name."""
    while not isinstance(node, ast.Name):
        node = next((value for key in ("value", "left", "func") if (value := getattr(node, key, None)) is not None), None)
        if node is None:
            return ""
    return node.id


def opened_to_write(call: ast.Call) -> bool:
    """`open(path, "w")`, `path.open(mode="r+b")`; appending does not count."""
    given = [*call.args, *(key.value for key in call.keywords)]
    modes = [set(item.value) for item in given if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return any(mode <= set("rwxab+t") and (mode & set("wx") or {"r", "+"} <= mode) for mode in modes)


def writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("open", "fdopen"):
        return opened_to_write(call)
    if name in COPIERS:
        return isinstance(call.func, ast.Attribute) and root_name(call.func.value) in MODULES and len(call.args) > 1
    return name in WRITERS


def guarded(call: ast.Call, around: list[ast.AST]) -> bool:
    """Whether the call is inside an atomic block of stages/runtime/files.py, or writes to a path that a caller got from one."""
    blocks = [item.context_expr for node in around if isinstance(node, ast.With) for item in node.items]
    if any(isinstance(block, ast.Call) and root_name(block) in ATOMIC for block in blocks):
        return True
    return "partial" in {root_name(item) for item in [call.func, *call.args]}


def test_no_file_is_written_in_place() -> None:
    """A reader, or a run after a power cut, must find complete files: writes go through stages/runtime/files.py.

    A function that is given the path inside one of its blocks calls it `partial`.
    """
    found: dict[str, list[int]] = {}
    for path in [*source_files("stages"), *source_files("flows")]:
        if path == Path("stages/runtime/files.py"):
            continue
        for function, node, around in functions(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            own_name = isinstance(node, ast.Assign) and "partial" in {root_name(item) for item in node.targets}
            if own_name or (isinstance(node, ast.Call) and writes(node) and not guarded(node, around)):
                found.setdefault(f"{path} {function}", []).append(node.lineno)
    in_place = {place: lines for place, lines in found.items() if place not in EXEMPT}
    assert not in_place, f"write these through stages/runtime/files.py: {in_place}"
    assert set(EXEMPT) <= set(found), f"no such write: {sorted(set(EXEMPT) - set(found))}"


@pytest.mark.parametrize(
    "line",
    [
        "path.write_text('a')",
        "(folder / 'x').write_bytes(data)",
        "open(path, 'w').write('a')",
        "path.open(mode='r+b')",
        "json.dump(value, handle)",
        "torch.save(value, path)",
        "shutil.copy2(a, b)",
        "model.save_pretrained(folder)",
        "pq.write_table(table, path)",
    ],
)
def test_check_detects_writes_in_place(line: str) -> None:
    (call,) = [(node, around) for _, node, around in functions(ast.parse(line)) if isinstance(node, ast.Call) and writes(node)]
    assert not guarded(*call)
