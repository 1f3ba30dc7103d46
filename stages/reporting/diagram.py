"""The pipeline as a mermaid diagram, from DVC's graph of dvc.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.runtime.yaml_files import read_yaml

SOURCES = ("data/raw", "data/base")
"""Source folders in the diagram; code and parameters are left out."""


def _reads(dependencies: list[str], folder: str) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for path in dependencies)


def pipeline_graph(root: Path) -> Any:
    """A networkx DiGraph of stage names with an edge from each stage to its dependents; a matrix stage is one node.

    Raises dvc.exceptions.NotDvcRepoError if `root` is no DVC project.
    """
    import networkx as nx
    from dvc.repo import Repo

    graph = nx.DiGraph()
    with Repo(str(root)) as repo:
        for stage, dependency in repo.index.graph.edges:  # DVC's edges lead to the dependency
            if {Path(item.path_in_repo) for item in (stage, dependency)} == {Path("dvc.yaml")}:
                names = [item.name.partition("@")[0] for item in (dependency, stage)]
                graph.add_edge(*names)
    return graph


def mermaid(root: Path) -> str:
    """A fenced mermaid block: solid arrows lead to the next stages, dotted ones to further readers of a stage's outputs."""
    import networkx as nx

    entries = read_yaml(root / "dvc.yaml")["stages"]
    graph = pipeline_graph(root)
    next_ones = nx.transitive_reduction(graph)
    place = {name: number for number, name in enumerate(entries)}
    lines = ["```mermaid", "flowchart LR"]
    for folder in SOURCES:
        lines.append(f'  {folder.replace("/", "_")}[("{folder}")]')
    for name in [name for name in entries if name in graph]:  # one whose matrix is empty has no items
        entry = entries[name]
        title = f"{name}@domain" if "matrix" in entry else name
        lines.append(f'  {name}["<b>{title}</b><br/>{entry["desc"]}"]')
    for folder in SOURCES:
        readers = [name for name, entry in entries.items() if name in graph and _reads(entry["deps"], folder)]
        lines += [f"  {folder.replace('/', '_')} {'-->' if name == readers[0] else '-.->'} {name}" for name in readers]
    for start, end in sorted(graph.edges, key=lambda edge: (place[edge[0]], place[edge[1]])):
        lines.append(f"  {start} {'-->' if next_ones.has_edge(start, end) else '-.->'} {end}")
    return "\n".join([*lines, "```"])
