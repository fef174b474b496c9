"""Files on machines with several processes each: written once, read by all, removed after the last. Without Ray."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.backend.embedded.protocol import SocketAddress
from agentlightning.backend.ray.carry import CarriedModels, Packed, Weights
from agentlightning.backend.ray.host import Host
from agentlightning.backend.ray.server import Placed
from agentlightning.errors import BackendDied


@dataclass(frozen=True, slots=True)
class Here(Placed):
    """A host of this process: what is asked of it, it does in a thread."""

    does: Counter[str] = field(default_factory=Counter)
    dead: list[str] = field(default_factory=list)
    """What it dies of when it is asked for it."""

    async def ask(self, method: str, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        if method in self.dead or "all" in self.dead:
            self.dead.append("all")
            raise BackendDied(f"{self.name} is gone.")
        self.does[method] += 1
        given = [await part if isinstance(part, asyncio.Future) else part for part in arguments]
        return await asyncio.to_thread(getattr(self.actor, method), *given)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes hosts: so many on each of so many machines."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a host sets up the logging of a process of its own
    hosts: list[Host] = []

    def make(*counts: int) -> list[Here]:
        made: list[Here] = []
        for machine, count in enumerate(counts):
            for _ in range(count):
                host = Host(f"engine {len(hosts)}", 30, str(tmp_path / str(machine)))
                hosts.append(host)
                *_, word = host.listen("127.0.0.1")
                made.append(Here(f"engine {len(hosts)}", host, SocketAddress("127.0.0.1", 1, ""), len(hosts), word))
        return made

    yield make
    for host in hosts:
        host._door.close()  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]


def weights_of(learner: Here) -> Weights:
    folder = learner.actor._folder

    async def export(policy: str, path: str) -> None:
        target = Path(path) / "weights"
        await asyncio.to_thread(target.parent.mkdir)
        target.write_text(policy)

    def pack(name: str) -> asyncio.Future[Packed]:
        return asyncio.ensure_future(asyncio.to_thread(learner.actor.pack, name))

    actor = SimpleNamespace(pack=SimpleNamespace(remote=pack))
    placed = Placed("learner", actor, learner.address, learner.pid, learner.machine)
    return Weights(export, placed, CarriedModels(str(folder)))


def left(folder: Path) -> list[Path]:
    return list(folder.glob("*/policy-*"))


async def read(weights: Weights, host: Here, name: str, text: str) -> None:
    path = Path(await weights.give_to(host, name))
    for _ in range(20):
        await asyncio.sleep(0.001 * host.pid)
        assert (path / "weights").read_text() == text
    await weights.take_from(host, name)


@pytest.mark.parametrize("counts", [(1,), (2,), (3,), (2, 1), (3, 2), (1, 1, 1)])
async def test_a_machine_has_one_copy_for_all_its_processes(machines: Any, tmp_path: Path, counts: tuple[int]) -> None:
    hosts = machines(*counts)
    assert len({host.machine for host in hosts}) == len(counts)
    weights = weights_of(hosts[0])
    for number in range(3):
        name, text = f"policy-{number}", f"version {number}"
        await weights.put(text, name)
        weights.expect(name, hosts)
        await asyncio.gather(*(read(weights, host, name, text) for host in hosts))
        assert sum(host.does["take"] for host in hosts) == (number + 1) * len(counts)
        assert not left(tmp_path), "nobody reads them any more"


@pytest.mark.parametrize("method", ["take", "drop"])
async def test_a_process_that_dies_leaves_its_machine_in_order(machines: Any, tmp_path: Path, method: str) -> None:
    first, *others = hosts = machines(3, 1)
    weights = weights_of(hosts[1])
    await weights.put("text", "policy-0")
    weights.expect("policy-0", hosts)
    first.dead.append(method)
    ends = await asyncio.gather(*(read(weights, h, "policy-0", "text") for h in hosts), return_exceptions=True)
    assert [end for end in ends[1:] if end is not None] == []
    await weights.leave(first)
    assert not left(tmp_path)
    assert sum(host.does["take"] for host in others) >= 1


async def test_files_that_vanished_or_changed_are_written_again(machines: Any) -> None:
    hosts = machines(2)
    weights = weights_of(hosts[0])
    await weights.put("text", "policy-0")
    weights.expect("policy-0", hosts)
    path = Path(await weights.give_to(hosts[0], "policy-0"))
    for spoil in (lambda: (path / "weights").write_text("other"), lambda: (path / "weights").unlink()):
        spoil()
        await weights.look_again(hosts[0], "policy-0")
        assert await weights.give_to(hosts[0], "policy-0") == str(path)
        assert (path / "weights").read_text() == "text"
