"""A page is looked at by a real browser: Debian's chromium, without a network and without downloading a driver."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)

_OVERFLOW = """
const wide = document.documentElement.clientWidth, found = [];
if (document.documentElement.scrollWidth > wide) found.push('document ' + document.documentElement.scrollWidth);
const scrolls = (element) => {
  for (let at = element; at && at !== document.body; at = at.parentElement) {
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(at).overflowX)) return true;
  }
  return false;
};
for (const element of document.body.querySelectorAll('*')) {
  const box = element.getBoundingClientRect();
  if (box.width > 0 && (box.right > wide + 0.5 || box.left < -0.5) && !scrolls(element.parentElement)) {
    found.push(element.tagName + '.' + element.getAttribute('class') + ' ' + box.left + ' to ' + box.right);
  }
}
return found;
"""


@dataclass
class Browser:
    """One headless Chromium; ``open`` shows a page at a width and in a colour scheme."""

    driver: Any

    def open(self, path: Path, *, width: int = 1280, scheme: str = "light", media: str = "screen") -> None:
        """Load a page afresh; what it logs and what it requests is kept from here on."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(path.as_uri())

    def run(self, script: str) -> Any:
        """The result of JavaScript that the test, not the page, executes."""
        return self.driver.execute_script(script)

    def warnings(self) -> list[str]:
        """Everything the console said since the page was opened, violations of its security policy included."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What the page asked for, apart from itself and from data inside it."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        addresses = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        return [address for address in addresses if not address.startswith(("file:", "data:", "about:"))]

    def overflow(self) -> list[str]:
        """Elements that stick out of the page; what scrolls inside its own box does not count."""
        return list(self.run(_OVERFLOW))

    def broken_images(self) -> int:
        """How many pictures did not load."""
        return int(self.run("return [...document.images].filter(i => !(i.complete && i.naturalWidth > 0)).length"))

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG, for a person to look at."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return document.documentElement.clientWidth")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        path.write_bytes(self.driver.get_screenshot_as_png())


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium with a fresh profile for the whole session; skips where it or its driver is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs the programs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(
        executable_path=driver
    )  # named, so that selenium looks for none and downloads none
    session = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(session)
    finally:
        session.quit()
