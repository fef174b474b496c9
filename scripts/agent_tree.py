"""The picture of a coding agent's tree: one rollout of Claude Code, with a sub-agent and a summary of its history.

    npm install --prefix /tmp/agents @anthropic-ai/claude-code
    PATH=/tmp/agents/node_modules/.bin:$PATH python scripts/agent_tree.py docs/assets

The agent is the real one. A script stands in for the model: it starts a sub-agent, and then reads a long file again and
again until it is asked to sum up.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agentlightning.litagent.known_agents import KNOWN_AGENTS  # noqa: E402
from agentlightning.store import SqliteLightningStore  # noqa: E402
from scripts.agents import early, run  # noqa: E402
from scripts.screenshots import SETTLED, dashboard  # noqa: E402
from tests.clients.stand_ins import DELEGATES, LONG, READS, STARTS, SUB_TASK, compacting, delegating  # noqa: E402

LOOKS = {"": "light"}


def at_work(prompt: str, given: object) -> str:
    """Starts a sub-agent, which reads the file once; then reads until it is asked to sum up, and ends."""
    if SUB_TASK in prompt and "MAIN-TASK" not in prompt:
        return compacting(prompt, given) if prompt.count("<tool_response>\n") < 1 else "All done."
    started = SUB_TASK in prompt or "MAIN-TASK" not in prompt or not any(name in prompt for name in STARTS)
    return compacting(prompt, given) if started else delegating(prompt, given)


async def recorded(file: Path) -> str:
    """Runs the agent once, and prints what its tree comes to; the rollout's id."""
    store = SqliteLightningStore(file)
    task = {"prompt": f"{DELEGATES['prompt']} Then: {READS['prompt']}"}
    seen = await run(early(KNOWN_AGENTS["claude-code"]), at_work, task, LONG, store)
    assert seen.worked, (seen.error, seen.output[-2000:])
    assert seen.of_sub_agents, "no sub-agent was started"
    assert seen.summed_up, "nothing was summed up"
    calls = seen.calls
    computed = sum(len(call.prompt_ids) + len(call.response_ids) for call in calls)
    print(
        f"{len(calls)} calls, {len(seen.of_sub_agents)} of a sub-agent; {seen.exact} of {len(seen.later)} later calls "
        f"go on exactly; {computed:,} tokens in prompts and responses, {sum(len(c.response_ids) for c in calls):,} "
        "sampled"
    )
    return calls[0].info.rollout_id


def picture(file: Path, rollout_id: str, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with dashboard(file) as url, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for look, scheme in LOOKS.items():
            options: dict[str, Any] = {"viewport": {"width": 1360, "height": 900}, "color_scheme": scheme}
            page = browser.new_context(**options).new_page()
            page.set_default_timeout(90_000)
            page.goto(f"{url}/rollouts/{rollout_id}?tab=tree")
            page.locator("svg.tree").wait_for()
            page.wait_for_timeout(SETTLED)
            print(page.locator(".stack .row").first.inner_text().replace("\n", " "))
            page.locator(".stack:has(svg.tree)").last.screenshot(path=str(folder / f"agent-tree{look}.png"))
        browser.close()


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "store.db")
        picture(file, asyncio.run(recorded(file)), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
