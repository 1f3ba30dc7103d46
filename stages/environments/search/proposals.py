"""Questions about the encyclopaedia that are not from a recipe: read as words, and answered from the pages that were found."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stages.environments.search.world import RELATIONS, question

_QUESTION = re.compile(r"who is the ([a-z]+(?: of the [a-z]+)*) of ([a-z]+)\??", re.IGNORECASE)
_PAGE = re.compile(r"^([A-Z][a-z]+) [A-Z][a-z]+: ([^.]+)\.", re.MULTILINE)


def parsed(text: str) -> tuple[str, tuple[str, ...]] | None:
    """The start and the relations, in the order in which they are followed, of a question in the domain's grammar."""
    found = _QUESTION.fullmatch(text.strip())
    if found is None:
        return None
    relations = tuple(reversed(found[1].lower().split(" of the ")))
    return (found[2].capitalize(), relations) if set(relations) <= set(RELATIONS) else None


def facts_in(evidence: str) -> dict[tuple[str, str], set[str]]:
    """(name, relation) -> values that the pages in a text state; several, if pages of different worlds are mixed."""
    facts: dict[tuple[str, str], set[str]] = {}
    for page in _PAGE.finditer(evidence):
        for fact in page[2].split("; "):
            relation, _, value = fact.partition(" ")
            facts.setdefault((page[1], relation), set()).add(value)
    return facts


def read(text: str, evidence: str) -> str | None:
    """The answer that the pages in `evidence` give to a question; None if they give none, or several."""
    asked, facts = parsed(text), facts_in(evidence)
    if asked is None:
        return None
    name, relations = asked
    for relation in relations:
        values = facts.get((name, relation), set())
        if len(values) != 1:
            return None
        (name,) = values
    return name


def scripted(spec: Mapping[str, Any]) -> Sequence[str]:
    """A proposer's actions for a task's chain, from its answer back, and the question."""
    queries = [f"search {hop['relation']} {hop['value']}" for hop in reversed(spec["chain"])]
    if len(queries) == 1:
        queries.insert(0, f"search {spec['answer']}")
    return [*queries, "question " + question(spec["start"], spec["relations"])]
