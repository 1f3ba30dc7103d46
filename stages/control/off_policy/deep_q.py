"""Deep Q-learning on a task with numbered actions.

`python -m stages.control.off_policy.deep_q --settings FILE --result FILE` trains once: a run of lane control with
`environment: deep_q`. The agent is in dqn.py, the loop in training.py.
"""

from __future__ import annotations

import torch

from stages.control.learnt import Learnt
from stages.control.off_policy.dqn_settings import DeepQ
from stages.control.off_policy.training import Training
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.values.heads import CategoricalHead


def learn(settings: DeepQ) -> Learnt:
    """Train once; see `Rounds.learnt`. clamped: share of the targets beyond the head's support."""
    training = Training(settings)
    training.train()
    head = training.agent.head
    clamped = head.clamped / max(1, head.seen) if isinstance(head, CategoricalHead) else 0.0
    return training.learnt(updates=float(training.agent.updates), clamped=clamped)


def run(settings: DeepQ) -> dict[str, float]:
    """The figures of `learn`."""
    return learn(settings).figures


@command
def main() -> int:
    return one_run("control", __doc__, DeepQ, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
