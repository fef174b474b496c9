"""In a real browser: login where a store is served to a network, prompts and what changed in them, hostile text."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.dashboard import Dashboard
from agentlightning.doctor.judge import labels_in
from agentlightning.errors import StoreError
from agentlightning.net.server import LoopServer
from agentlightning.store import LightningStoreServer, SqliteLightningStore
from agentlightning.types import PromptTemplate
from tests.dashboard.conftest import add_broken_rollout, add_rollout
from tests.dashboard.test_pages import PATIENCE, check_accessible_async, find_chromium

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MARKUP = '<img src=x onerror="window.owned=1"><script>window.owned=2</script>'
TURNED = "\u202egnp.exe\u202c \x1b[2J\x1b]0;owned\x07 [click](javascript:window.owned=3)"
HOSTILE = f"{MARKUP} {TURNED}"


@pytest.fixture
async def network(store: SqliteLightningStore) -> AsyncIterator[str]:
    """The address of a dashboard as it is served to a network."""
    pages = Dashboard(store, key="the-key", loopback=False)
    server = LoopServer(pages, "127.0.0.1", 0, what="dashboard", error=StoreError)
    await server.start()
    yield f"http://127.0.0.1:{server.port}/dashboard"
    await server.stop()


@pytest.fixture
async def page(server: LightningStoreServer, network: str) -> AsyncIterator[Any]:
    """A page whose console stays clean, and on which nothing of what was said is run. It ends before the servers."""
    del server, network
    playwright = pytest.importorskip("playwright.async_api", reason="the package playwright is not installed")
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(PATIENCE)
        complaints: list[str] = []
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"a dialog: {dialog.message}"))
        yield page
        assert await page.evaluate("window.owned") is None
        await browser.close()
    assert [c for c in complaints if "status of 401" not in c] == []


async def test_a_network_sees_nothing_before_it_logs_in(network: str, page: Any) -> None:
    url = network
    await page.goto(f"{url}/rollouts")
    key = page.get_by_label("Key of the store")
    await key.wait_for()
    assert await page.locator("tbody tr").count() == 0
    await check_accessible_async(page)
    await key.fill("wrong")
    await key.press("Enter")
    await page.get_by_text("This is not the store's key.").wait_for()
    await key.fill("the-key")
    await page.get_by_role("button", name="Log in").click()
    await page.locator("tbody tr").first.wait_for()
    assert page.url == f"{url}/rollouts", "it goes on where one wanted to be, and the key is in no address"
    await page.reload()
    await page.locator("tbody tr").first.wait_for()
    kept = await page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert "the-key" not in kept


async def test_versions_of_a_prompt_are_laid_side_by_side(
    page: Any, store: SqliteLightningStore, server: LightningStoreServer
) -> None:
    await store.add_resources({"prompt": PromptTemplate(template="You add numbers.\nBe brief.\nSay so.")})
    await store.add_resources({"prompt": PromptTemplate(template=f"You add numbers.\nBe exact. {HOSTILE}\nSay so.")})
    await page.goto(f"{server.endpoint}/dashboard/resources")
    await page.locator(".diff .add").first.wait_for()
    assert await page.locator(".diff .del").all_inner_texts() == ["Be brief."]
    (added,) = await page.locator(".diff .add").all_inner_texts()
    assert added.startswith("Be exact. <img src=x")
    assert "\u202e" not in added
    assert "\x1b" not in added
    same = await page.locator(".diff .same").all_inner_texts()
    assert {"You add numbers.", "Say so."} <= {text.removeprefix("template:").strip() for text in same}
    await check_accessible_async(page)
    await page.locator("table.list tbody tr").nth(1).click()
    await page.locator(".diff .add").first.wait_for(state="detached")
    assert await page.locator("img").count() == 0


async def test_what_was_said_harms_no_page(
    page: Any, store: SqliteLightningStore, server: LightningStoreServer
) -> None:
    await add_rollout(store, "evil", [7, 8], 1.0, said=HOSTILE)
    await add_rollout(store, "bad-too", [7, 9], 0.0, said=HOSTILE)
    at = f"{server.endpoint}/dashboard"
    await page.goto(f"{at}/rollouts")
    for path, shown in (
        ("/rollouts", "tbody tr"),
        ("/rollouts/evil", ".msg.assistant"),
        ("/rollouts/evil?tab=tokens", ".t"),
        ("/rollouts/evil?tab=tree", "h1"),
        ("/rollouts/evil?tab=spans", ".fall-row"),
        ("/rollouts/evil/group", "h1"),
    ):
        await page.goto(at + path)
        await page.locator(shown).first.wait_for()
        text = await page.locator("body").inner_text()
        assert not {c for c in text if c in "\x1b\x07\u202e\u202c"}, path
        assert await page.locator("img, iframe, object, a[href^='javascript']").count() == 0, path
        assert await page.title() != "owned"
    await page.goto(f"{at}/rollouts/evil")
    await page.locator(".msg.assistant").first.wait_for()
    assert "<script>window.owned=2</script>" in await page.locator(".msg.assistant").first.inner_text(), (
        "shown, not run"
    )


async def test_where_a_history_broke_is_shown_in_its_text(
    page: Any, store: SqliteLightningStore, server: LightningStoreServer
) -> None:
    await add_broken_rollout(store)
    await page.goto(f"{server.endpoint}/dashboard/rollouts/broke?tab=tree")
    row = page.get_by_role("row").filter(has_text="clock")
    assert (await row.locator("del").inner_text()).startswith("7 now")
    assert (await row.locator("ins").inner_text()).startswith("9 now")
    assert "last user message" in await row.inner_text()
    await check_accessible_async(page)
    await page.goto(f"{server.endpoint}/dashboard/rollouts/broke")
    await page.get_by_text(re.compile("^clock: .* tokens lost$")).wait_for()
    await page.goto(f"{server.endpoint}/dashboard/runs/run-1")
    await page.get_by_text("Groups without a difference").wait_for()
    await check_accessible_async(page)


async def test_labels_are_given_beside_the_answers_and_downloaded_for_the_judge(
    page: Any, server: LightningStoreServer, tmp_path: Path
) -> None:
    """They stay in the browser, also when it is opened again; the file is one that `agl judge` reads."""
    await page.goto(f"{server.endpoint}/dashboard/rollouts/good/group")
    for rollout, label in (("good", "1"), ("bad", "0.5")):
        await page.get_by_label(f"Label of {rollout}").fill(label)
    await page.reload()
    await page.get_by_label("Label of bad").fill("0")
    async with page.expect_download() as download:
        await page.get_by_text("Download labels.jsonl").click()
    await (await download.value).save_as(tmp_path / "labels.jsonl")
    assert labels_in(tmp_path / "labels.jsonl", ["good", "bad"]) == {"good": 1.0, "bad": 0.0}
    await page.get_by_label("Label of good").fill("")
    await page.get_by_text("One rollout of this run has a label").wait_for()
    await check_accessible_async(page)
