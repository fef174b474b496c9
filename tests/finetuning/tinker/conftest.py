"""A training server in a thread of its own, and the official client of the `tinker` API."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from agentlightning.finetuning.app import ServerSettings, TrainingServer
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.finetuning.tinker.archive import SavedWeights
from agentlightning.finetuning.tinker.service import TinkerService

tinker: Any = pytest.importorskip("tinker")
types: Any = tinker.types
T = TypeVar("T")
SECONDS = 120


class Running:
    """A server that runs."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        bases = {name: BaseModel(name, "calc", {"device": "cpu"}) for name in ("calc", "org/other")}
        self.server = self.run(self._start(bases, ServerSettings(**{"port": 0, "max_context": 512, **settings})))
        self.url = self.server.endpoint.removesuffix("/v1")

    async def _start(self, bases: dict[str, BaseModel], settings: ServerSettings) -> TrainingServer:
        server = TrainingServer(self.folder, bases, settings)
        await server.start()
        return server

    @property
    def service(self) -> TinkerService:
        return self.server.tinker

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    def saved(self, path: str, owner: str = "admin") -> SavedWeights:
        async def find() -> SavedWeights:
            return self.service.archive.find(owner, path)

        return self.run(find())

    def stop(self) -> None:
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()

    @contextmanager
    def client(self, key: str = "tml-any") -> Iterator[Any]:
        """A `ServiceClient`, whose session ends with the block."""
        client = tinker.ServiceClient(base_url=self.url, api_key=key)
        try:
            yield client
        finally:
            client.close("success").result()


Start = Callable[..., Running]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The client leaves connections to the garbage collector, which complains of each."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.delenv("TINKER_BASE_URL", raising=False)
        yield
    with warnings.catch_warnings():  # what is left belongs to no later test
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    server = Running(tmp_path_factory.mktemp("served") / "served")
    yield server
    server.stop()


@pytest.fixture
def service(running: Running) -> Iterator[Any]:
    with running.client() as client:
        yield client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers of one's own, on the same folder unless another is given."""
    started: list[Running] = []

    def begin(folder: Path = tmp_path / "served", **settings: Any) -> Running:
        started.append(Running(folder, **settings))
        return started[-1]

    yield begin
    for server in started:
        if not server._loop.is_closed():  # pyright: ignore[reportPrivateUsage]
            server.stop()


def ids(seed: int, count: int = 12) -> np.ndarray:
    """Ordinary tokens."""
    return np.random.default_rng(seed).integers(0, 291, count)


def datum(tokens: Sequence[int] | np.ndarray, **inputs: Any) -> Any:
    """A sequence of which each token but the first is a target."""
    tokens = np.asarray(tokens)
    given = {name: np.asarray(value, dtype=np.float32) for name, value in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], **given},
    )


def prompt(tokens: Sequence[int] | np.ndarray) -> Any:
    return types.ModelInput.from_ints(np.asarray(tokens).tolist())


def training_client(service: Any, **given: Any) -> Any:
    return service.create_lora_training_client(**{"base_model": "calc", "rank": 8, "seed": 1, **given}).result()


def rest(service: Any) -> Any:
    """The client of what was saved, on the connections of another one; one of its own stays open for good."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return service.create_rest_client()


def adapter_of(running: Running, path: str) -> Path:
    """The folder of the adapter that a path names."""
    return running.saved(path).adapter
