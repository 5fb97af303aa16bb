"""A real browser without a window, for pages that must draw: Debian's Chromium, driven by selenium."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.watch import until

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)
OFFLINE = ("file:", "data:", "blob:", "about:", "chrome:", "chrome-untrusted:")


def why_not() -> str | None:
    """Return why there is no browser here; None where there is one."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "Chromium is not installed: apt-get install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium, which drives Chromium, is not installed: pip install selenium"
    return None


class Browser:
    """One window.

    Attributes:
        driver: of selenium.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path) -> float:
        """Open *page*, wait until it has drawn all, and return the seconds from the start of the navigation until then."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(page.absolute().as_uri())
        until(lambda: self.run("return document.documentElement.dataset.readyMs"), "the page has drawn all")
        return float(self.run("return document.documentElement.dataset.readyMs")) / 1e3

    def run(self, script: str, *arguments: object) -> Any:
        """Return what *script* returns."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        found: str = self.run("return document.querySelector(arguments[0]).textContent", selector)
        return found

    def click(self, selector: str) -> None:
        """Click an element."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def move_to(self, x: float, y: float, *, click: bool = False) -> None:
        """Move the mouse to a point of the window, in pixels, as a hand does it."""
        for at in ((x - 3, y - 3), (x, y)):
            self._mouse("mouseMoved", *at)
            time.sleep(0.05)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self._mouse(kind, x, y, button="left", clickCount=1)

    def _mouse(self, kind: str, x: float, y: float, **more: object) -> None:
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})

    def problems(self) -> list[str]:
        """Return what the page has complained about since it was opened: errors, and what its policy refused."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses beyond this machine that were asked for since the page was opened."""
        messages = [msgspec.json.decode(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(OFFLINE)]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
