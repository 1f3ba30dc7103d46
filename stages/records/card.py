"""What a published method's module opens with. docs/methods.md is made from these. Light to import."""

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
