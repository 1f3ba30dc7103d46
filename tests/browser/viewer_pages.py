"""What a reader does in the viewer, and what its index says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from selenium.webdriver.support.ui import WebDriverWait

from screenshots.chromium import Browser

SHOWN = "return document.querySelector('#view-episodes .content').dataset.ready"
COUNTED = """const count = document.querySelector("#view-episodes .count");
return count.dataset.ready === "yes" && count.textContent"""
"""False while a search runs. One script, since the page may start a search between two."""
PAIR = "return document.querySelector('#view-compare .episode').dataset.ready"
GRAPH = "return document.querySelector('#view-paths .graph').dataset.ready"


def entries(index: dict[str, Any]) -> list[dict[str, Any]]:
    """The index by episode."""
    found = []
    for group in index["groups"]:
        for place, short in enumerate(group["id"]):
            task = index["tasks"][group["domain"]][group["task"][place]]
            one = {name: group[name][place] for name in ("turns", "refused", "reward")}
            one |= {
                "domain": group["domain"],
                "source": group["source"],
                "task": task,
                "hits": group["hits"],
                "place": str(place),
            }
            one |= {"id": short[1:] if short[0] == "=" else task + short, "stop": group["stops"][group["stop"][place]]}
            found.append({**one, "outcome": index["outcomes"][int(group["outcome"][place])]})
    return found


def wait(browser: Browser, true: Callable[[], Any]) -> None:
    WebDriverWait(browser.driver, 10).until(lambda _: true())


def visit(browser: Browser, viewer: Path, ready: str = SHOWN, **hash_: object) -> None:
    """Open the page at an address, and wait until the script `ready` returns something."""
    browser.driver.get("about:blank")
    browser.open(f"{viewer.resolve().as_uri()}#{'&'.join(f'{key}={quote(str(value))}' for key, value in hash_.items())}")
    wait(browser, lambda: browser.run(ready))


def address(browser: Browser) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(browser.driver.current_url).fragment).items()}


def count(browser: Browser) -> int:
    shown = WebDriverWait(browser.driver, 10).until(lambda _: browser.run(COUNTED))
    return int(shown.split(" of ")[0])
