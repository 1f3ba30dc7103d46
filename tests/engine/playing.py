"""Ragged rollouts of several turns with an engine."""

from __future__ import annotations

import torch

from stages.engine.engine import Sampling
from stages.engine.local_engine import LocalEngine


def random_tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 61, (count,), generator=generator).tolist()


Histories = dict[int, tuple[list[int], list[bool], list[float]]]


def play(engine: LocalEngine, lengths: dict[int, int], forked: int = 0, turns: int = 2) -> Histories:
    """Session name -> (all tokens, mask of sampled tokens, log-probabilities of these). Names from 100 are forks of one session
    with a prompt of `forked` tokens."""
    prompts = {name: random_tokens(name, length) for name, length in lengths.items()}
    sessions = {engine.open(prompt): name for name, prompt in prompts.items()}
    if forked:
        root = engine.open(random_tokens(99, forked))
        copies = engine.fork(root, 2)
        sessions |= {copy: 100 + place for place, copy in enumerate(copies)}
        prompts |= dict.fromkeys((100, 101), random_tokens(99, forked))
    played: Histories = {name: (list(prompt), [False] * len(prompt), []) for name, prompt in prompts.items()}
    for turn in range(turns):
        for session, name in sessions.items():
            if turn:
                seen = random_tokens(1000 + name, 7)
                engine.extend(session, seen)
                played[name][0].extend(seen)
                played[name][1].extend([False] * len(seen))
            engine.request(session, 10 * name + turn, Sampling(max_tokens=5 + name % 3))
        while finished := engine.advance():
            for done in finished:
                tokens, drawn, logprobs = played[sessions[done.session]]
                tokens += done.token_ids
                drawn += [True] * len(done.token_ids)
                logprobs += done.logprobs
    engine.reset()
    return played
