"""Domains are found by name through entry points; errors suggest the nearest name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stages.environments.registry import GROUP, load_domain

SHIPPED = ["briefing", "calculator", "code", "factbook", "keydoor", "outside_agent", "search", "shop", "textworld", "wordle"]


def test_shipped_domains_are_registered():
    assert set(SHIPPED) <= set(GROUP.points())


@pytest.mark.parametrize(
    "name", ["briefing", "calculator", "code", "factbook", "keydoor", "outside_agent", "search", "shop", "textworld", "wordle"]
)
def test_domain_has_its_name_and_default_settings(name):
    domain = load_domain(name)
    assert domain.name == name
    assert domain.settings == load_domain(name, {}).settings == domain.Settings()


def test_unknown_domain_error_suggests_the_nearest_and_lists_all():
    with pytest.raises(ValueError, match=r"unknown domain 'textwrld'; did you mean 'textworld'\?.*search"):
        load_domain("textwrld")
    with pytest.raises(ValueError, match=r"unknown domain 'xyz'.*search.*textworld"):
        load_domain("xyz")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turn": 3}, "environment.max_turn'. Did you mean 'max_turns'"),
        ({"max_turns": 0}, "max_turns"),
        ({"levels": []}, "levels"),
        ({"goals": ["fly"]}, "goals"),
    ],
)
def test_invalid_settings_error_names_the_key(settings, message):
    with pytest.raises(ValueError, match=rf"(?s){message}"):
        load_domain("textworld", settings)


def test_loading_a_domain_imports_neither_torch_nor_game_library():
    """Checking params.yaml must stay fast."""
    code = (
        "import sys; from stages.environments.registry import load_domain; load_domain('textworld');"
        "print([name for name in ('torch', 'transformers', 'textworld', 'jericho') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
