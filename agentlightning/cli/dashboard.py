"""`agl dashboard`: the pages of a run, a folder of runs, or a store, in a browser."""

from __future__ import annotations

import webbrowser
from contextlib import nullcontext
from pathlib import Path

from aiohttp import ClientError, ClientTimeout

from agentlightning.cli.commands.look import DashboardOptions
from agentlightning.cli.interrupt import interrupted
from agentlightning.cli.store import Location, as_address
from agentlightning.console import Console
from agentlightning.dashboard import dashboard_url, served_with_dashboard
from agentlightning.errors import ConfigError
from agentlightning.net.local_keys import kept_key, made_key
from agentlightning.net.outgoing import http_session, reason_of
from agentlightning.store.http.server import PAGES
from agentlightning.trainer.folder import STORE_FILE
from agentlightning.trainer.live import RUN_FILE, Live, announced, find_live, served_file
from agentlightning.trainer.sync import run_sync

console = Console(highlight=False, soft_wrap=True)
_SECONDS = 10.0
"""How long a server may take to answer."""


def show_dashboard(options: DashboardOptions) -> None:
    """Serve the dashboard until Ctrl-C; of a run that goes on, and of a store that is served, say where it is."""
    where = options.where
    if where is not None and where.startswith(("http://", "https://")):
        url = dashboard_url(where.rstrip("/").removesuffix(PAGES))
        run_sync(_check(url))
        _tell(url, options.browser)
        return
    location = Location(None, where) if where and "://" in where else Location(_store_file(where), None)
    run_sync(_show(location, options))


async def _check(url: str) -> None:
    """Raises ConfigError where no dashboard is."""
    try:
        async with http_session(timeout=ClientTimeout(total=_SECONDS)) as session, session.get(url) as answer:
            status = answer.status
    except (ClientError, TimeoutError, ValueError) as error:
        why = reason_of(error)
    else:
        if status in (200, 401, 403):
            return
        why = f"the server there answers {status}, so it is no store"
    raise ConfigError(
        f"There is no dashboard at {url}: {why}. Give the URL that a run, agl store or agl dashboard prints."
    )


def _store_file(where: str | None) -> Path:
    """A store's file, the one of a run's folder, or of the latest run in a folder of runs."""
    path = Path(where or "runs")
    if path.is_file():
        return path
    if (path / STORE_FILE).is_file():
        return path / STORE_FILE
    found = sorted(path.glob(f"*/{STORE_FILE}"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise ConfigError(
            f"There is no store in '{path}'.{as_address(path)} Give a run's folder, a folder of runs, the file of a "
            "store, the URL of one that is served, or postgresql://…"
        )
    return found[-1]


async def _show(location: Location, options: DashboardOptions) -> None:
    browser, key = options.browser, options.key
    if location.path is not None and (live := await _served_already(location.path)) is not None:
        _tell(dashboard_url(live.url), browser)
        return
    runs = location.path and location.path.parent.parent if _is_of_a_run(location) else None
    made = made_key(key, options.host)  # the pages are to be read by everybody here; what is behind them is not
    async with location.opened() as store:
        live = location.dsn is not None
        server = served_with_dashboard(
            store,
            options.host,
            options.port,
            admin_key=made or key,
            live=live,
            folder=runs,
            allow_hosts=options.allow_host,
        )
        await server.start()
        try:
            with (
                kept_key(server.port, made),
                nullcontext() if location.path is None else announced(location.path, server.endpoint, made or key),
            ):
                console.print(f"{location}  (Ctrl-C stops)")
                _tell(dashboard_url(server.endpoint), browser)
                await interrupted()
        finally:
            await server.stop()


async def _served_already(file: Path) -> Live | None:
    """Who serves the store in this file now: the run, or somebody who looks at it."""
    of_run = await find_live(file.parent) if file.name == STORE_FILE else None
    return of_run or await find_live(file.parent, served_file(file))


def _is_of_a_run(location: Location) -> bool:
    return location.path is not None and (location.path.parent / RUN_FILE).is_file()


def _tell(url: str, browser: bool) -> None:
    console.print(f"Dashboard: {url}")
    if browser:
        webbrowser.open(url)
