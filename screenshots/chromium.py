"""Headless Chromium through selenium: a fresh profile, nothing fetched from outside, the console's messages kept.

Needs Debian's packages chromium and chromium-driver (or Chrome and a chromedriver of its version on the path) and the package
selenium, which the extra `dev` brings.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVERS = ("chromedriver",)
HOW_TO_GET = "apt-get install chromium chromium-driver"
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # Chromium's own sandbox does not start for root; these pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-extensions",
    "--disable-crash-reporter",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-pings",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--proxy-server=127.0.0.1:9",  # nobody listens there: what is not on this machine cannot be reached
    "--proxy-bypass-list=127.0.0.1;localhost",
)
PHONE = (390, 844)
DESK = (1280, 900)


def found(names: tuple[str, ...]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def lacking() -> str:
    """What is missing for a browser to start, and how to get it; "" if nothing is."""
    missing = []
    if found(BROWSERS) is None:
        missing.append("chromium")
    if found(DRIVERS) is None:
        missing.append("chromium-driver")
    if missing:
        return f"{' and '.join(missing)} not found ({HOW_TO_GET})"
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium is not installed (pip install -c requirements.lock -e '.[dev]')"
    return ""


class Browser:
    """A selenium driver with what pages are looked at with: size, colour scheme, the console's errors."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        self.forgiven = ""
        """Pattern of the console's errors that do not count: a page that is not ours may have some of its own."""
        self._messages: list[dict[str, Any]] = []

    def open(self, address: str | Path) -> None:
        """Open a URL, or a file by its path, and wait until it is loaded."""
        self.driver.get(address.resolve().as_uri() if isinstance(address, Path) else address)

    def view(self, size: tuple[int, int] = DESK, dark: bool = False, scale: float = 1.0) -> None:
        """Width and height in CSS pixels (below 500 wide: a touch screen), colour scheme, device pixels per CSS pixel."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, motion]})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a piece of JavaScript in the page."""
        return self.driver.execute_script(script, *arguments)

    def errors(self) -> list[str]:
        """Errors on the console since the start, failed loads included."""
        self._messages += self.driver.get_log("browser")
        texts = [message["message"] for message in self._messages if message["level"] == "SEVERE"]
        return [text for text in texts if not (self.forgiven and re.search(self.forgiven, text))]

    def png(self) -> bytes:
        """What the window shows."""
        return self.driver.get_screenshot_as_png()


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with an empty profile of its own, ended with all its processes at the end.

    Raises RuntimeError that says what to install where browser, driver or selenium are missing.
    """
    if missing := lacking():
        raise RuntimeError(missing)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    os.environ.setdefault("SE_OFFLINE", "true")  # selenium would look for drivers on the network
    os.environ.setdefault("SE_AVOID_STATS", "true")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(found(BROWSERS))
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={DESK[0]},{DESK[1]}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(found(DRIVERS))))
        try:
            driver.set_page_load_timeout(120)
            driver.set_script_timeout(60)
            yield Browser(driver)
        finally:
            driver.quit()
