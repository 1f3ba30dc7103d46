"""Agent-RLVR's defaults, and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from stages.algorithms.resolve import resolve_section, warm_start_of
from stages.algorithms.settings import Rl
from stages.params import parse_params
from stages.runtime.validation import ParamsError


def test_defaults_of_the_method() -> None:
    method, section = resolve_section(Rl(algorithm="agent_rlvr"))
    assert (method.data, section.preference.source, section.preference.loss) == ("pairs", "guided", "dpo")
    found = warm_start_of(section)
    assert found is not None
    assert (found[0].card.slug, found[1].settings.fraction) == ("rejection_sft", 0.2)
    assert warm_start_of(resolve_section(Rl(algorithm="agent_rlvr", warm_start={}))[1]) is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"preference": {"source": "trees"}}, r"agent_rlvr learns from guided attempts: set it to guided"),
        ({"preference": {"level": "step"}}, r"guided attempts are whole episodes: set it to trajectory"),
        ({"guidance": {"kinds": ["plan", "plan"]}}, r"lists one twice"),
        ({"guidance": {"source": "server"}}, r"rl\.guidance\.server\.model is empty: name the model at the server"),
        ({"guidance": {"server": {"model": "m"}}}, r"rl\.guidance\.server has no effect here"),
        ({"preference": {"reward_learning_rate": 0.1}}, r"reward_learning_rate has no effect here"),
        ({"algorithm": "dpo", "guidance": {"attempts": 2}}, r"rl\.guidance\.attempts has no effect here"),
        ({"algorithm": "grpo", "guidance": {"attempts": 2}}, r"rl\.guidance\.attempts has no effect: algorithm grpo"),
        (
            {"algorithm": "grpo", "warm_start": {"algorithm": "rejection_sft", "settings": {"guided": True}}},
            r"leave settings\.guided",
        ),
        ({"algorithm": "rejection_sft", "settings": {"fraction": 0}}, r"fraction"),
        ({"algorithm": "step_dpo", "preference": {"reward_model": True}}, r"set level to trajectory"),
    ],
)
def test_invalid_settings_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve_section(Rl(**{"algorithm": "agent_rlvr", **section}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"curate": {"expert_demonstrations": 0}}, r"curate\.expert_demonstrations is 0: set it to 1, or source to mcts"),
        ({"model": {"lora": {"rank": 4}}, "rl": {"preference": {"reward_model": True}}}, r"set model\.lora\.rank to 0"),
        ({"evaluate": {"models": ["rl@toy+reward"]}}, r"rl@toy\+reward needs a reward model"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], message: str) -> None:
    own = {"rollout": {"tasks": 96}, "rl": {"algorithm": "agent_rlvr"}}
    values = {"domains": ["toy"], "per_domain": {"toy": own}, **sections}
    with pytest.raises(ParamsError, match=message):
        parse_params(values)
