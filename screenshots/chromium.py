"""Headless Chromium through selenium, with a fresh profile, without network access, with its console messages.

Needs Debian's packages chromium and chromium-driver (or Chrome and a matching chromedriver on the path) and selenium (extra
`dev`).
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
    "--no-sandbox",  # Chromium's sandbox does not start for root
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
    "--proxy-server=127.0.0.1:9",  # nothing listens there, so other machines cannot be reached
    "--proxy-bypass-list=127.0.0.1;localhost",
)
LOADED_WITHIN_S = 120
PHONE = (390, 844)
DESK = (1280, 900)


def found(names: tuple[str, ...]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def lacking() -> str:
    """What is missing to start a browser, and how to install it; "" if nothing is."""
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
    """A selenium driver with window size, colour scheme and console errors."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        self.ignored = ""
        """Pattern of console errors to ignore, for third-party pages."""
        self._messages: list[dict[str, Any]] = []

    def open(self, address: str | Path) -> None:
        """Open a URL or a file and wait until it is loaded."""
        from selenium.webdriver.support.ui import WebDriverWait

        self.driver.get(address.resolve().as_uri() if isinstance(address, Path) else address)
        # On a busy machine, chromedriver may return from a second navigation of a tab before the page is parsed.
        WebDriverWait(self.driver, LOADED_WITHIN_S, 0.02).until(
            lambda driver: self.run("return document.readyState") == "complete"
        )

    def view(self, size: tuple[int, int] = DESK, dark: bool = False, scale: float = 1.0) -> None:
        """Set width and height in CSS pixels (mobile below a width of 500), colour scheme, device pixels per CSS pixel."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, motion]})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page and return its value."""
        return self.driver.execute_script(script, *arguments)

    def lay_out_figures(self) -> None:
        """Also those that the page lays out only when they come near."""
        rule = ".plot { content-visibility: visible !important }"
        self.run("document.head.append(Object.assign(document.createElement('style'), {textContent: arguments[0]}))", rule)

    def renew(self) -> None:
        """Go on in a new tab, without what earlier ones left of cookies, messages and view. Passwords and stored data stay."""
        old = self.driver.current_window_handle
        self.driver.switch_to.new_window("tab")
        new = self.driver.current_window_handle
        self.driver.switch_to.window(old)
        self.driver.close()
        self.driver.switch_to.window(new)
        self.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        self.driver.get_log("browser")
        self._messages, self.ignored = [], ""
        self.view()

    def errors(self) -> list[str]:
        """Console errors since the start, including failed loads."""
        self._messages += self.driver.get_log("browser")
        texts = [message["message"] for message in self._messages if message["level"] == "SEVERE"]
        return [text for text in texts if not (self.ignored and re.search(self.ignored, text))]

    def png(self) -> bytes:
        """A screenshot of the window."""
        return self.driver.get_screenshot_as_png()


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with an empty profile; all its processes end with the context.

    Raises RuntimeError naming what to install if browser, driver or selenium are missing.
    """
    if missing := lacking():
        raise RuntimeError(missing)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    os.environ.setdefault("SE_OFFLINE", "true")  # otherwise selenium looks for drivers on the network
    os.environ.setdefault("SE_AVOID_STATS", "true")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(found(BROWSERS))
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={DESK[0]},{DESK[1]}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(found(DRIVERS))))
        try:
            driver.set_page_load_timeout(LOADED_WITHIN_S)
            driver.set_script_timeout(60)
            yield Browser(driver)
        finally:
            driver.quit()
