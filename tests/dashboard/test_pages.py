"""The pages in a real browser, over real runs of the calculator: watched, filtered, followed down to the tokens."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentlightning.metrics.catalogue import GROUPS
from tests.algorithm.test_branches import agent_of, trained

ROOT = Path(__file__).parents[2]
PATIENCE = 90_000
"""Milliseconds in which a page must show what it is waited for: machines are busy."""
AXE = ROOT / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose console must stay clean."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    # A run that ends takes its server with it, which the open stream notices.
    # An answer of 404 the browser reports by itself.
    expected = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE", "status of 404")
    assert [c for c in complaints if not any(words in c for words in expected)] == []


class Command:
    """A command that prints the dashboard's address; `url` waits for it."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentlightning", *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.lines: list[str] = []

    def url(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"Dashboard: (\S+)/$", line):
                return found[1]
        raise AssertionError(f"no address was printed: {self.lines}")

    def finish(self) -> None:
        self.lines += self.process.communicate(timeout=600)[0].splitlines()
        assert self.process.returncode == 0, self.lines

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


def train(run_dir: Path, *options: str) -> Command:
    return Command("demo", "calc", "--run-dir", str(run_dir), *options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, whose settings differ."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("first", "0"), ("second", "1")):
        command = train(folder / name, "--steps", "2", "--seed", seed)
        command.url()
        command.finish()
    return folder


@pytest.fixture(scope="module")
def shown(runs: Path) -> Iterator[str]:
    command = Command("dashboard", str(runs / "first"), "--no-open")
    yield command.url()
    command.stop()


def check_accessible(page: Any) -> None:
    """axe-core finds nothing serious; where it is not installed (no Node), that is not checked."""
    if AXE.is_file():
        page.evaluate(AXE.read_text())
        nothing_serious(page.evaluate(_RUN_AXE))


async def check_accessible_async(page: Any) -> None:
    """The same of a page that is driven asynchronously."""
    if AXE.is_file():
        await page.evaluate(AXE.read_text())
        nothing_serious(await page.evaluate(_RUN_AXE))


_RUN_AXE = "async () => (await axe.run(document, {resultTypes: ['violations']})).violations"


def nothing_serious(found: list[Any]) -> None:
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert serious == [], json.dumps([(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in serious], indent=1)


def test_a_run_is_watched_while_it_goes_on(page: Any, tmp_path: Path) -> None:
    command = train(tmp_path / "run", "--steps", "6")
    url = command.url()
    assert command.lines[0].startswith("Dashboard: "), command.lines
    page.goto(url)
    page.get_by_text("Live", exact=True).wait_for()
    page.get_by_role("link", name="run", exact=True).first.click()
    page.get_by_role("img", name=re.compile("Mean reward: .*training")).wait_for()
    first = page.get_by_text(re.compile(r"^\d+ / 6$")).first.inner_text()
    deadline = time.monotonic() + PATIENCE / 1000
    while page.get_by_text(re.compile(r"^\d+ / 6$")).first.inner_text() == first:  # by itself: nothing is reloaded
        assert time.monotonic() < deadline, "the page did not follow the run"
        page.wait_for_timeout(200)
    command.finish()
    page.get_by_text("Not connected").wait_for()


def test_a_rollout_shows_those_that_went_on_from_it_and_how_to_fork_it(page: Any, tmp_path: Path) -> None:
    trained(tmp_path / "run", agent_of(3), steps=1, tasks_per_step=1)
    with closing(sqlite3.connect(tmp_path / "run" / "store.db")) as store:
        rows = store.execute("select rollout_id, metadata from rollouts").fetchall()
    root = next(i for i, text in rows if json.loads(text).get("branches", {}).get("trained"))
    command = Command("dashboard", str(tmp_path / "run"), "--no-open")
    try:
        page.goto(f"{command.url()}/rollouts/{root}")
        page.get_by_text(re.compile(r"^4 went on from here$")).first.wait_for()
        check_accessible(page)
        button = page.get_by_role("button", name=re.compile(f"fork .*run {root} --trust --at 1"))
        assert button.inner_text() == "Fork from here"
        page.locator(".call-mark a.link").first.click()
        page.get_by_text("not trained").first.wait_for()
    finally:
        command.stop()


def test_from_the_table_to_the_tokens_and_the_tree(page: Any, shown: str) -> None:
    page.goto(f"{shown}/rollouts")
    page.get_by_text("rollouts", exact=False).first.wait_for()
    check_accessible(page)
    page.get_by_label("Step").fill("1")
    page.wait_for_url("**step=1**")
    page.get_by_label("Reward from").fill("1")
    page.wait_for_url("**reward_min=1**")
    page.get_by_role("button", name="Only group").first.wait_for()
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts/ro-*")
    page.locator(".msg.assistant").first.wait_for()
    check_accessible(page)
    page.get_by_role("link", name="Tokens", exact=True).click()
    page.locator(".t:not(.prompt)").first.click()
    page.get_by_text("Log-prob", exact=True).nth(1).wait_for()
    page.get_by_text("Advantage", exact=True).first.click()
    page.wait_for_url("**colour=advantage**")
    check_accessible(page)
    page.get_by_text("Ratio", exact=True).first.click()
    page.get_by_role("button", name="Compute with the run's weights").click()
    page.get_by_text("By the weights after step").wait_for()
    page.get_by_text("Entropy", exact=True).first.click()
    page.locator(".t:not(.prompt)[style*='--hot']").first.wait_for()
    check_accessible(page)
    page.get_by_role("link", name="Token tree").click()
    page.get_by_role("group", name=re.compile("Token tree of")).wait_for()
    check_accessible(page)
    page.get_by_role("link", name="Spans").click()
    page.locator(".fall-row").nth(1).click()
    page.get_by_text("gen_ai.request.model").first.wait_for()
    page.get_by_role("link", name=re.compile("siblings")).click()
    page.get_by_text("siblings").first.wait_for()
    check_accessible(page)


def test_two_runs_are_compared(page: Any, shown: str) -> None:
    page.goto(shown)
    page.get_by_role("checkbox").nth(1).wait_for()
    for box in page.get_by_role("checkbox").all():
        box.check()
    check_accessible(page)
    page.get_by_role("button", name="Compare 2 runs").click()
    page.get_by_role("img", name=re.compile("^Mean reward: (first|second) from .* (first|second) from ")).wait_for()
    row = page.get_by_role("row").filter(has=page.get_by_role("cell", name="seed", exact=True))
    assert sorted(row.get_by_role("cell").all_inner_texts()[1:]) == ["0", "1"]
    check_accessible(page)


def test_metrics_are_grouped_named_once_searched_and_pinned(page: Any, shown: str) -> None:
    page.goto(shown)
    page.get_by_role("link", name="first", exact=True).click()
    page.locator("details.group").first.wait_for()
    groups = page.locator("details.group summary h3").all_inner_texts()
    assert groups == list(GROUPS)
    assert page.locator("details.group:not([open]) h3").all_inner_texts() == [GROUPS[-1]]
    page.locator("details.group:not([open]) summary").click()
    titles = page.locator("details.group .titled").all_inner_texts()
    assert len(titles) == len(set(titles)) > 25
    assert page.get_by_text("A metric of your own").count() == 0
    page.get_by_role("button", name=re.compile("^Entropy: The mean entropy")).first.hover()
    page.get_by_role("tooltip", name=re.compile("The mean entropy")).wait_for()
    check_accessible(page)
    page.get_by_role("button", name="Pin Entropy").click()
    page.reload()
    page.locator("details.group", has=page.get_by_role("heading", name="Pinned")).get_by_text("Entropy").wait_for()
    page.get_by_label("Find a metric").fill("learning_rate")
    page.get_by_text("Learning rate", exact=True).wait_for()
    assert page.locator("details.group .titled").count() == 1
    page.get_by_label("Find a metric").fill("")
    page.get_by_role("button", name="Pin Entropy").click()


@pytest.mark.parametrize(
    "path", ["", "/rollouts", "/resources", "/workers", "/runs/RUN", "/runs/RUN/rollouts", "/compare"]
)
def test_pages_fit_a_phone(page: Any, shown: str, path: str, runs: Path) -> None:
    run = json.loads((runs / "first" / "run.json").read_text())["run_id"]
    page.set_viewport_size({"width": 420, "height": 900})
    page.goto(shown + path.replace("RUN", run))
    page.locator("main h1").wait_for()
    page.get_by_role("status").first.wait_for()
    page.wait_for_load_state("networkidle") if path == "/compare" else page.locator("main .card").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    assert page.locator("aside").bounding_box()["height"] < 80
    if path.endswith("rollouts"):
        page.locator("td.task").first.wait_for()
        assert page.locator("td.task").first.bounding_box()["width"] > 150
    check_accessible(page)


@pytest.mark.parametrize("path", ["", "/resources", "/workers", "/runs/none", "/nowhere", "/rollouts/none"])
def test_every_page_is_there_and_errors_say_what_is_wrong(page: Any, shown: str, path: str) -> None:
    page.goto(shown + path)
    page.locator("h1, h2").first.wait_for()
    check_accessible(page)


def test_the_built_pages_are_those_of_the_source(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or not (ROOT / "dashboard" / "node_modules").is_dir():
        pytest.skip("Node's packages are not installed: npm ci in dashboard/")
    version = subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (20, 19):
        pytest.skip(f"Vite needs Node 20.19 or later, and this is {version.strip()}")
    subprocess.run(
        [npm, "exec", "--", "vite", "build", "--outDir", str(tmp_path / "built")],
        cwd=ROOT / "dashboard",
        check=True,
        capture_output=True,
    )
    static = ROOT / "agentlightning" / "dashboard" / "static"

    def files(folder: Path) -> dict[str, bytes]:
        return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}

    assert files(tmp_path / "built") == files(static), "run `make dashboard` and commit what it builds"
