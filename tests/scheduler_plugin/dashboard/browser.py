"""A headless Chromium, and what a test asks of a page of Bokeh plots."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = CHROMIUM is None or DRIVER is None
WHY = "chromium and chromedriver are not installed (apt-get install chromium chromium-driver)"


@contextmanager
def browser(width: int = 1400, height: int = 1500) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in (
            "headless",
            "no-sandbox",
            "disable-gpu",
            "disable-quic",
            "no-first-run",
            "disable-background-networking",
            "disable-component-update",
            "disable-sync",
            "disable-dev-shm-usage",
            f"window-size={width},{height}",
            f"user-data-dir={folder}",
        ):
            options.add_argument(f"--{argument}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        driver.set_page_load_timeout(60)
        driver.set_script_timeout(30)
        try:
            yield driver
        finally:
            driver.quit()


def visit(driver: Any, address: str, timeout: float = 30.0) -> None:
    """Load a page and wait until Bokeh has drawn it."""
    driver.get(address)
    ready = "return Boolean(window.Bokeh && Bokeh.documents[0] && Bokeh.documents[0].is_idle)"
    end = time.monotonic() + timeout
    while not driver.execute_script(ready):
        assert time.monotonic() < end, f"{address} is not drawn after {timeout:g} s"
        time.sleep(0.1)


def complaints(driver: Any) -> list[str]:
    """Errors and warnings of the page's console since this was last asked."""
    return [
        entry["message"]
        for entry in driver.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ]


_PLOTS = """
const found = [];
const visit = (view, shown) => {
  const model = view.model;
  const visible = shown && model.visible !== false;
  if (model.type === "Figure" || model.type === "DataTable") {
    const box = view.el.getBoundingClientRect();
    const counts = (model.renderers || []).map((renderer) => {
      const data = renderer.data_source.data;
      const columns = data instanceof Map ? [...data.values()] : Object.values(data);
      return columns.length ? columns[0].length : 0;
    });
    if (model.type === "DataTable") {
      const data = model.source.data;
      const columns = data instanceof Map ? [...data.values()] : Object.values(data);
      counts.push(columns[0].length);
    }
    found.push({
      name: model.name || model.type, title: model.title ? model.title.text : "",
      visible: visible, counts: counts,
      axes: (model.below || []).concat(model.left || []).map((axis) => axis.axis_label),
      left: box.left, top: box.top, right: box.right, bottom: box.bottom,
    });
  }
  for (const child of (view.child_views || [])) visit(child, visible);
};
for (const view of Object.values(Bokeh.index.roots || Bokeh.index)) visit(view, true);
return found;
"""


def plots(driver: Any) -> list[dict[str, Any]]:
    """Figures and tables: name, title, whether visible, items by glyph, labels of axes, box in pixels."""
    found: list[dict[str, Any]] = driver.execute_script(_PLOTS)
    return found


_TABLE = """
let rows = null;
const visit = (view) => {
  if (view.model.type === "DataTable") {
    rows = [...view.shadow_el.querySelectorAll(".slick-row")].map((row) => row.innerText.split("\\n"));
  }
  for (const child of (view.child_views || [])) visit(child);
};
for (const view of Object.values(Bokeh.index.roots || Bokeh.index)) visit(view);
return rows;
"""


def table(driver: Any) -> list[list[str]]:
    """What the rows of the page's table say, as drawn."""
    found: list[list[str]] = driver.execute_script(_TABLE)
    return found


def overlaps(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of visible plots that cover each other by more than a pixel."""
    shown = [plot for plot in found if plot["visible"]]
    return [
        (one["name"], other["name"])
        for i, one in enumerate(shown)
        for other in shown[i + 1 :]
        if min(one["right"], other["right"]) - max(one["left"], other["left"]) > 1
        and min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) > 1
    ]


def shot(driver: Any, path: str) -> None:
    """The whole page as PNG."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    driver.set_window_size(1400, max(400, height + 140))
    time.sleep(1.0)
    driver.save_screenshot(path)
