"""A run while it goes on: its row in the store with what it says, and a door through which other processes read it.

The store is served on loopback; the address and a key made for this life of the run are in a file in the run's folder
that only its owner may read, and that is gone when the run is. One that a killed process left behind is recognised:
nobody answers there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import msgspec
from pydantic import BaseModel

import agentlightning.dashboard as dashboard
from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.features import FeatureSettings
from agentlightning.algorithm.records import ByName, flattened
from agentlightning.errors import AgentError, StoreError, message_of
from agentlightning.files import atomic_write
from agentlightning.keys import new_key
from agentlightning.litagent import LitAgent
from agentlightning.metrics import StoreSink
from agentlightning.metrics.standing import LIVE_FILE as LIVE_FILE, write_end
from agentlightning.reading import read_object
from agentlightning.runner.remote import Address
from agentlightning.store import LightningStoreClient
from agentlightning.store.base import LightningStore
from agentlightning.store.sql import SqlLightningStore
from agentlightning.trainer.folder import RUN_FILE as RUN_FILE, STORE_FILE
from agentlightning.types import FINISHED_ROLLOUT, RolloutStatus, Run, RunStatus
from agentlightning.types.ids import random_hex

logger = logging.getLogger(__name__)

SERVED_FILE = "served.json"
"""The same as LIVE_FILE, of a store that is only looked at, as by `agl dashboard`."""
ANSWER_SECONDS = 5.0
"""A run that does not answer for so long is taken for dead."""


@dataclass(frozen=True, slots=True)
class Live:
    """Where a run that goes on is read."""

    url: str
    key: str | None = field(repr=False)
    pid: int


def describe(run_dir: Path, algorithm: Algorithm, agent: LitAgent[Any], about: Mapping[str, Any] | None = None) -> Run:
    """What the run is: its algorithm with all settings, where its agent is, and `about` it. Also written to its folder.

    A run that goes on keeps its id, which its folder knows.
    """
    name, source = agent.origin
    about = {**(about or {}), **_own_metrics(algorithm)}
    known = {
        "run_id": _known_id(run_dir) or f"run-{random_hex(8)}",
        "algorithm": type(algorithm).__name__,
        "settings": flattened(algorithm) if is_dataclass(algorithm) else {},
        "agent": name,
        "source": source,
        "status": RunStatus.RUNNING.value,
        **about,
    }
    text = json.dumps(known, indent=2, default=_plain)
    atomic_write(run_dir / RUN_FILE, text)
    return Run(
        run_id=known["run_id"],
        algorithm=known["algorithm"],
        agent=name or "",
        settings=json.loads(text)["settings"],
        state={"source": source, "run_dir": str(run_dir.resolve()), **about},
    )


def _own_metrics(algorithm: Algorithm) -> dict[str, Any]:
    """What the user's own parts say of the metrics that they report, for pages that cannot import them."""
    parts = algorithm.parts if isinstance(algorithm, FeatureSettings) else ()
    own = [metric._asdict() for part in parts for metric in part.metrics]
    return {"own_metrics": own} if own else {}


def _known_id(run_dir: Path) -> str | None:
    try:
        return str(read_object(run_dir / RUN_FILE)["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def known_settings(run_dir: Path) -> dict[str, Any]:
    """The algorithm and settings of the run in a folder, as its `run.json` has them; nothing where there is none."""
    try:
        known = read_object(run_dir / RUN_FILE)
        return {"algorithm": known["algorithm"], **known["settings"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _plain(value: Any) -> Any:
    """A setting that is no JSON value, for people."""
    if isinstance(value, ByName):
        return value.by_name()
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if isinstance(value, PurePath):
        return str(value)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else repr(value)


async def cancel_leftovers(store: LightningStore, run_id: str | None = None) -> None:
    """Rollouts of a run that died are not picked up: the step they belonged to is sampled again. None: of any run."""
    open_statuses = [status for status in RolloutStatus if status not in FINISHED_ROLLOUT]
    runs = None if run_id is None else [run_id]
    for rollout in await store.query_rollouts(status_in=open_statuses, run_id_in=runs):
        try:
            await store.update_rollout(rollout.rollout_id, status=RolloutStatus.CANCELLED)
        except StoreError as error:
            logger.warning("Rollout %s of an earlier run could not be cancelled: %s", rollout.rollout_id, error)


@asynccontextmanager
async def recorded(
    store: LightningStore, run: Run, sink: StoreSink, *, first_step: int, stopped: Callable[[], bool]
) -> AsyncIterator[None]:
    """Begin the run in its store, write what `sink` gets, and record in the end what became of it.

    What the run itself finds unfit to learn from stops it, and so does who interrupts it; any other error is a failure.
    """
    await store.begin_run(run, first_step=first_step)
    status, reason = RunStatus.STOPPED, None
    try:
        async with sink.writing():
            yield
        status, reason = (RunStatus.STOPPED if stopped() else RunStatus.SUCCEEDED), None
    except Exception as error:
        status = RunStatus.STOPPED if isinstance(error, AgentError) else RunStatus.FAILED
        reason = message_of(error) or type(error).__name__
        raise
    finally:
        write_end(Path(run.state["run_dir"]), status, reason)
        try:
            await store.update_run(run.run_id, status=status, error=reason, state={"doing": None})
        except StoreError as error:
            logger.warning("The store does not know how the run ended: %s", error)


async def open_door(stack: AsyncExitStack, store: LightningStore, address: Address | None, run_dir: Path) -> str | None:
    """Let other processes read the run until `stack` ends; at `address`, if its store is served already.

    Returns where people see it; None if the store is somebody else's.
    """
    if address is None:
        if not isinstance(store, SqlLightningStore):
            return None  # it is read there
        key = new_key()
        server = dashboard.served_with_dashboard(store, port=0, admin_key=key, folder=run_dir.parent)
        await server.start()
        stack.push_async_callback(server.stop)
        address = Address(server.endpoint, key)
    file = run_dir / LIVE_FILE
    _write_privately(file, Live(address.url, address.key, os.getpid()))
    stack.callback(lambda: file.unlink(missing_ok=True))
    return dashboard.dashboard_url(address.url)


def _write_privately(file: Path, live: Live) -> None:
    """In one step, readable by its owner from the first moment on."""
    work = file.with_name(f".{file.name}.{os.getpid()}")
    work.unlink(missing_ok=True)
    with open(work, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as opened:
        json.dump(asdict(live), opened)
    work.replace(file)


def served_file(store: Path) -> str:
    """The name of the file beside a store's that says who serves it."""
    return SERVED_FILE if store.name == STORE_FILE else f"{store.name}.{SERVED_FILE}"


@contextmanager
def announced(store: Path, url: str, key: str | None) -> Iterator[None]:
    """Let others read the store in this file through the server at `url`, for the length of the block: one process
    alone may open it."""
    file = store.with_name(served_file(store))
    try:
        _write_privately(file, Live(url, key, os.getpid()))
    except OSError as error:  # a folder that may only be read
        logger.debug("Others cannot find the store %s: %s", store, error)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


async def readable_by_others(stack: AsyncExitStack, store: SqlLightningStore, file: Path) -> None:
    """Serve a store on this machine alone, until `stack` ends, so that `agl show FILE` reads it meanwhile."""
    key = new_key()
    server = dashboard.served_with_dashboard(store, port=0, admin_key=key)
    await server.start()
    stack.push_async_callback(server.stop)
    stack.enter_context(announced(file, server.endpoint, key))


async def connect(run_dir: Path, name: str = LIVE_FILE) -> LightningStoreClient | None:
    """A client of the run that goes on in this folder, or with SERVED_FILE of who looks at it; None if nobody does."""
    live = await find_live(run_dir, name)
    return None if live is None else LightningStoreClient(live.url, live.key, retry_seconds=ANSWER_SECONDS)


async def find_live(run_dir: Path, name: str = LIVE_FILE) -> Live | None:
    """Where the run that goes on in this folder is read; None if none does."""
    try:
        live = Live(**read_object(run_dir / name))
    except (OSError, ValueError, TypeError):
        return None
    if not isinstance(live.url, str) or not isinstance(live.key, str | None):
        return None
    probe = LightningStoreClient(live.url, live.key, retry_seconds=0.0, request_seconds=ANSWER_SECONDS)
    try:
        await probe.statistics()
    except StoreError:  # nobody answers, or another program does now
        return None
    finally:
        await probe.close()
    return live
