"""Reward of a purchase: WebShop's (Yao et al., arXiv 2207.01206, section 3 and appendix).

r = r_type (|attributes matched| + |options matched| + [price <= limit]) / (|attributes requested| + |options requested| + 1).
Words match if they are equal: catalogues have only single words, so WebShop's fuzzy matching is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stages.environments.shop.catalogue import Goal, Item


def type_reward(bought: Sequence[str], wanted: Sequence[str], same_query: bool, same_category: bool) -> float:
    """r_type of two titles, given as their nouns: 0 for no common noun, 0.1 for less than a tenth of the wanted nouns, 0.5 for at
    most a fifth of them if neither query nor category agree, else 1."""
    score = len(set(bought) & set(wanted)) / len(set(wanted)) if wanted else 0.2
    if score == 0.0:
        return 0.0
    if score < 0.1:
        return 0.1
    return 1.0 if same_query or same_category or score > 0.2 else 0.5


def can_match(item: Item, goal: Goal) -> bool:
    """Whether `item` earns the full reward with the right options."""
    possible = {group: value for group, value in goal.options.items() if value in item.options[group]}
    return score(item, possible, goal)["reward"] == 1.0


def score(item: Item, picked: Mapping[str, str], goal: Goal) -> dict[str, float]:
    """Reward terms of buying `item` with the options `picked` (group -> value); "reward" combines them by the formula above.

    The kind serves as title, query and category: an item of another kind earns 0.
    """
    same = item.kind == goal.kind
    attributes = len(set(item.attributes) & set(goal.attributes))
    options = sum(picked.get(group) == value for group, value in goal.options.items())
    price = item.price <= goal.price_upper
    requested = len(goal.attributes) + len(goal.options) + 1
    r_type = type_reward([item.kind], [goal.kind], same, same)
    return {
        "reward": r_type * (attributes + options + price) / requested,
        "type": r_type,
        "attributes": attributes / len(goal.attributes),
        "options": options / len(goal.options) if goal.options else 1.0,
        "price": float(price),
    }
