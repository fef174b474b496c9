"""The screenshots of docs/dashboard.md, made again in a real Chromium over two runs of the calculator.

    agl demo calc --run-dir runs/calc-seed-0 --steps 32 --seed 0
    agl demo calc --run-dir runs/calc-seed-1 --steps 32 --seed 1
    python scripts/screenshots.py runs/calc-seed-0 docs/assets

The other runs are found beside the one that is named. A page of each kind is shown light, dark, and as wide as a phone.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOOKS = {
    "": {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "light"},
    "-dark": {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "dark"},
    "-phone": {"viewport": {"width": 420, "height": 900}, "color_scheme": "light"},
}
SETTLED = 1500
"""Milliseconds that charts and fonts take to stand still."""


@contextmanager
def dashboard(run: Path) -> Iterator[str]:
    """The address of the dashboard of a run, while it is served."""
    command = [sys.executable, "-m", "agentlightning", "dashboard", str(run), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found[1] for line in process.stdout if (found := re.search(r"Dashboard: (\S+)/$", line)))
        finally:
            process.terminate()


def take(page: Any, to: Path) -> None:
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(SETTLED)
    page.screenshot(path=str(to))


def show_run(page: Any, url: str, run_id: str) -> None:
    page.goto(f"{url}/runs/{run_id}")
    page.locator("details.group").first.wait_for()


def show_rollouts(page: Any, url: str, run_id: str) -> None:
    page.goto(f"{url}/runs/{run_id}/rollouts")
    page.locator("td.task").first.wait_for()


def show_compare(page: Any, url: str, run_id: str) -> None:
    page.goto(url)
    page.get_by_role("checkbox").nth(1).wait_for()
    for box in page.get_by_role("checkbox").all()[:2]:
        box.check()
    page.get_by_role("button", name="Compare 2 runs").click()
    page.get_by_role("img", name=re.compile("^Mean reward: ")).first.wait_for()


def show_tokens(page: Any, url: str, run_id: str) -> None:
    """The tokens of a rollout that earned nothing, coloured by ratio."""
    page.goto(f"{url}/rollouts?run={run_id}&mode=train&step=1&reward_max=0")
    page.locator("td.task").first.wait_for()
    page.locator("h1").click()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts/ro-*")
    page.get_by_role("link", name="Tokens", exact=True).click()
    page.get_by_text("Ratio", exact=True).first.click()
    page.get_by_role("button", name="Compute with the run's weights").click()
    page.get_by_text("By the weights after step").wait_for()
    page.locator(".t:not(.prompt)").nth(3).click()


def show_group(page: Any, url: str, run_id: str) -> None:
    """The siblings of a rollout."""
    page.goto(f"{url}/rollouts?run={run_id}&mode=train&step=1&reward_min=1")
    page.locator("td.task").first.wait_for()
    page.locator("h1").click()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts/ro-*")
    page.get_by_role("link", name=re.compile("siblings")).click()
    page.get_by_text("siblings").first.wait_for()


PAGES = {"run": show_run, "rollouts": show_rollouts, "compare": show_compare}
SINGLE = {"tokens": show_tokens, "group": show_group}


def main(run: Path, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    run_id = json.loads((run / "run.json").read_text())["run_id"]
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with dashboard(run) as url, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for look, options in LOOKS.items():
            for name, show in (PAGES | (SINGLE if not look else {})).items():
                context = browser.new_context(**options)
                page = context.new_page()
                page.set_default_timeout(90_000)
                show(page, url, run_id)
                take(page, folder / f"dashboard-{name}{look}.png")
                context.close()
                print(f"dashboard-{name}{look}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
