"""dare_ties: drop entries of each task vector at random, rescale the rest, elect signs and add."""

from __future__ import annotations

from stages.merging.methods.dare import Dare
from stages.records.card import Card


class DareTies(Dare):
    """DARE's random dropping, then TIES' sign election; a sum unless merge.normalize is true."""

    card = Card(
        slug="dare_ties",
        title="DARE with TIES sign election",
        paper="Yu et al., arXiv 2311.03099; Yadav et al., arXiv 2306.01708",
        equation="theta = theta_0 + lam * sum_{i agrees} w_i (m_i * t_i) / p, m_i ~ Bernoulli(p), sign elected per entry",
        assumptions="Those of DARE; models that disagree in sign interfere.",
        reduces_to="density 1: TIES with density 1 (given the same merge.normalize).",
        tested_by="tests/merging/test_dare.py",
        switch="merge.method: dare_ties",
    )
    elect = True


MERGER = DareTies()
