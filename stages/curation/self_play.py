"""Scripted conversations of the roles of self-play, for the warm-up of models that do not know them: a proposer that searches
from an answer back and asks, and a reader that answers from what it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.agent.prompts import load_prompt
from stages.algorithms.parts.self_play import (
    Proposal,
    SelfPlaySettings,
    failed_rule,
    mixed_evidence,
    proposal_of,
    proposer_prompt,
)
from stages.environments.protocol import Domain, Environment
from stages.environments.self_play import PROPOSER, SelfPlayEnvironment
from stages.records.episode import TurnRecord
from stages.records.task import Task, opening
from stages.seeding import permutation, stream


def scripted_actions(domain: Domain, task: Task, environment: Environment) -> list[str]:
    """A proposer's actions: the domain's script, or else the expert's until it would answer, and the task's prompt as the
    question."""
    if hasattr(domain, "proposal"):
        return list(domain.proposal(task))
    environment.reset(task)
    actions: list[str] = []
    while (action := domain.expert(environment)) is not None and not action.startswith("answer "):
        actions.append(action)
        environment.step(action)
    return [*actions, f"question {task.prompt}"]


def played(
    environment: SelfPlayEnvironment, task: Task, actions: Sequence[str]
) -> tuple[list[TurnRecord], list[dict[str, str]]] | None:
    """The turns and messages of a proposer that takes `actions`; None if one is refused or the episode does not end with them."""
    text = opening(task.prompt, environment.reset(task).text)
    turns, messages = [], [{"role": "user", "content": text}]
    for number, action in enumerate(actions):
        step = environment.step(action)
        if not step.accepted or step.done != (number == len(actions) - 1):
            return None
        turns.append(TurnRecord(action, step.observation.text, True, 0.0, step.cost, "", action, 0, 0))
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": step.observation.text}]
    return turns, messages[:-1]


def conversations(
    domain: Domain, folder: Path, tasks: Sequence[Task], settings: SelfPlaySettings, count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """`count` records for `curate.imports`, every third one a reader's; fewer if there are not enough tasks whose scripted
    proposal passes the rules of the gate and, where the domain reads by rules, whose evidence gives the answer."""
    gate = settings.gate
    inner, known = domain.make(folder), {task.task_id: task for task in tasks}
    environment = SelfPlayEnvironment(inner)
    before: list[Proposal] = []
    written = 0
    for task in permutation(list(tasks), "self_play.demonstrations", seed):
        rng = stream("self_play.demonstration", seed, task.task_id)
        text = proposer_prompt(settings.proposer, domain, task, known, rng)
        asked = replace(task, prompt=text, spec={**task.spec, "role": PROPOSER})
        found = played(environment, asked, scripted_actions(domain, task, inner))
        if found is None:
            continue
        proposal = proposal_of(task.spec["answer"], found[0])
        evidence = mixed_evidence(proposal.evidence, [one.evidence for one in before[-8:]], gate.noisy_blobs, rng)
        by_rules = not hasattr(domain, "read") or domain.read(proposal.question, evidence) == proposal.answer
        if failed_rule(proposal, gate) or not by_rules:
            continue
        before.append(proposal)
        reads = load_prompt(gate.prompt).fill(evidence=evidence, question=proposal.question)
        reader = [{"role": "user", "content": reads}, {"role": "assistant", "content": f"answer {proposal.answer}"}]
        for messages in [found[1], *([reader] if written % 3 == 1 else [])]:
            if written < count:
                written += 1
                yield {"domain": domain.name, "messages": messages}
        if written >= count:
            break
    environment.close()
