"""The card at the top of each published method's module, from which docs/methods.md is generated. Light to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    slug: str
    title: str
    paper: str
    equation: str
    assumptions: str
    reduces_to: str
    tested_by: str
    switch: str
