"""Rewards from references (`rl.reward.kind: references`): key words in order and style predicates; stages/judging/references.py.
Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from stages.algorithms.parts.part import AppliesTo, Part
from stages.runtime.validation import Count, NonNegative, ParamsError, Share

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl

KEYED = AppliesTo("content", "lcs", "recall")


class References(Part):
    """How an answer is compared with its task's references. They are the domain's (`reward_chain` or `references`), or else the
    answers of the training demonstrations."""

    data = ("episodes",)
    applies = AppliesTo("reward.kind", "references")

    content: Literal["lcs", "recall", "bleu", "random", "none"] = "lcs"
    """lcs: key words in the reference's order; recall: their coverage in any order; bleu: the best BLEU. random: a number in
    [0, 1) whatever the answer, and no style: the control of experiments."""
    content_weight: NonNegative = 0.5
    """Factor of the content. With style_weight 0.5, the paper's mean; the reference code adds both parts: 1 and 1."""
    style_weight: NonNegative = 0.5
    """Factor of the style."""
    matching: Annotated[Literal["longest_first", "reference"], KEYED] = "longest_first"
    """reference: as in the authors' code, key words in the order given, and all occurrences counted in the first reference."""
    case_sensitive: Annotated[bool, KEYED] = False
    """Tell capital letters from small ones."""
    length_penalty: NonNegative = 0.0
    """Factor of |rho - 1| where the number of words is not 0.9 to 1.2 times the reference's."""
    max_keyword_share: Annotated[Share | None, KEYED] = None
    """The content of an answer is worth nothing if more of its words belong to key words: bounds stuffing, where references have
    other words. null: no bound."""
    max_keyword_words: Count = 3
    """Longer key words are cut into parts of at most this many words."""
    least_own_reward: Share = 0.7
    """Tasks are left out on which no reference of their own reaches this mean of content (lcs) and style: their key words or
    demands were chosen badly. 0: none is."""
    corrupted: Annotated[Share, KEYED] = 0.0
    """Share of key words that are replaced by others, as a control of experiments."""

    def check(self, rl: Rl, method: Composition) -> None:
        if rl.reward.kind != "references":
            return
        if not self.content_weight + self.style_weight:
            raise ParamsError("rl.references: content_weight and style_weight are 0, so all rewards would be; set one above 0")
        if self.content == "none" and not self.style_weight:
            raise ParamsError("rl.references.content is none and style_weight is 0, so all rewards would be 0; set one of them")
        if rl.advantage.mean == "greedy":
            raise ParamsError(
                "rl.advantage.mean: greedy is the return of an episode that is not compared with references; set it to group, or "
                "rl.reward.kind to environment"
            )
