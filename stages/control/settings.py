"""Settings of the offline Q-learning lane; experiments of the board override them (reports/claims/hl_gauss.yaml)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Positive, Section, Share
from stages.values.settings import HeadParams
from stages.values.supports import check_support


class Game(Section):
    letters: Annotated[int, Field(ge=1, le=6)] = 2
    alphabet: Annotated[int, Field(ge=2, le=26)] = 6
    words: Annotated[int, Field(ge=2, le=4096)] = 32
    guesses: Annotated[int, Field(ge=2, le=12)] = 3

    @model_validator(mode="after")
    def _enough(self) -> Game:
        if self.words > self.alphabet**self.letters:
            raise ValueError(
                f"words: {self.words} words of {self.letters} letters do not exist: an alphabet of {self.alphabet} makes only "
                f"{self.alphabet**self.letters}; lower words, or raise alphabet"
            )
        return self


class OfflineQ(Section):
    """Q over guesses, learnt from an offline dataset of games."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    game: Game = Game()
    games: Count = 4000
    """Games of a careless player in the dataset; a tenth more are held out."""
    carelessness: Share = 0.5
    """Probability that a guess in the dataset is a random word."""
    noise: NonNegative = 0.0
    """A uniform draw from [0, noise] is added to every reward of the dataset."""
    target: Literal["max", "sarsa", "monte_carlo"] = "max"
    """max: r + gamma max_a Q(s', a); sarsa: r + gamma Q(s', a') with the guess that was made; monte_carlo: the return. The latter
    two evaluate the behaviour policy."""
    gamma: Share = 0.95
    conservative: NonNegative = 0.1
    """Weight of logsumexp_a Q(s, a) - Q(s, a_t)."""
    head: HeadParams = HeadParams(loss="hl_gauss", v_min=-4.0, v_max=2.0, bins=31)
    layers: Count = 2
    width: Annotated[int, Field(ge=8)] = 128
    updates: Count = 2000
    batch: Count = 64
    learning_rate: Positive = 1e-3
    target_every: Count = 50
    """Updates between copies of the weights to the target network."""
    play: Count = 400
    """Games of the greedy player in the evaluation."""

    @model_validator(mode="after")
    def _support(self) -> OfflineQ:
        worst = -float(sum(self.gamma**place for place in range(self.game.guesses)))
        check_support(self.head, worst, self.noise, "discounted returns")
        return self
