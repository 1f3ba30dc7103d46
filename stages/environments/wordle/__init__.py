"""The `wordle` domain: find a word in six guesses, each of which is marked letter by letter.

An episode: "letters d r b m f s.", `d r b`, "d not r in b not. from m f s with r. open open open.", `r m f`, ..., until the
guess is the word. `rules` marks guesses, `words` makes lists, `players` plays at several strengths, `exact` gives exact values.
"""

from stages.environments.wordle.domain import WordleDomain
from stages.environments.wordle.environment import WordleEnvironment
from stages.environments.wordle.settings import Level, WordleSettings

__all__ = ["Level", "WordleDomain", "WordleEnvironment", "WordleSettings"]
