"""An `Exchange` for servers that do not see the learner's folders: what the learner wrote goes to all of them at once.

The learner writes into its machine's memory as for any exchange. From there a program of its own (`transfer.py`) sends
it by broadcasts of torch.distributed, and each server's first worker writes what it receives into its machine's memory,
from where it is checked and loaded as a shared folder's files are. Whatever breaks on the way, a server goes on with
the weights that it has; it is sent the new ones again by itself, and then in a group of two.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agentlightning.backend.vllm.api import Sums
from agentlightning.backend.vllm.publication import SharedFolder, bytes_in
from agentlightning.backend.vllm.replica import Replica
from agentlightning.backend.vllm.worker.agl_vllm_worker import transfer
from agentlightning.backend.vllm.worker.agl_vllm_worker.transfer import Terms, files_of, own_address
from agentlightning.errors import BackendDied
from agentlightning.files import open_private

logger = logging.getLogger(__name__)

STEP_SECONDS = 60.0
"""How long a member of a group waits for the others."""
_START_SECONDS = 120.0
"""How long the program may take to import PyTorch."""
_END_SECONDS = 10.0
"""How long servers may take to see that a group is no more."""


class Sender:
    """The program that sends, on this machine. It is started when it is first needed, and again after it ended."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def offer(self, folder: Path, terms: Terms) -> Terms:
        """Let it wait for the others, at the port that the terms then have."""
        if self._process is None or self._process.returncode is not None:
            self._process = await self._start()
        process = self._process
        assert process.stdin is not None
        process.stdin.write(json.dumps({"folder": str(folder), "terms": asdict(terms)}).encode() + b"\n")
        try:
            async with asyncio.timeout(_START_SECONDS):
                return replace(terms, port=(await self._answer(process))["port"])
        except TimeoutError:
            raise BackendDied(f"What sends weights did not begin within {_START_SECONDS:.0f} s.") from None

    async def sent(self) -> None:
        """Wait until it has sent what was offered. Raises BackendDied where it could not."""
        assert self._process is not None
        await self._answer(self._process)

    async def _start(self) -> asyncio.subprocess.Process:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open_private(self._log, "ab") as words:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", transfer.__file__),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=words,
                start_new_session=True,  # a Ctrl-C is for our process alone
            )

    async def _answer(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended; what it said is in {self._log}"}
        if "error" in answer:
            raise BackendDied(f"Weights could not be sent: {answer['error']}")
        return answer

    async def end(self) -> None:
        """All connections of the group end with it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()


class Broadcast:
    """See `Exchange`."""

    def __init__(
        self, shared: SharedFolder, folder: Path, backend: str, log: Path, seconds: float = STEP_SECONDS
    ) -> None:
        """`folder` is that of `shared`; `backend` is torch.distributed's; `log` gets what the sending program says."""
        self._shared = shared
        self._folder = folder
        self._backend = backend
        self._seconds = seconds
        self._sender = Sender(log)
        self._lock = asyncio.Lock()
        self.published_bytes = 0

    async def put(self, policy: str, name: str) -> Sums:
        return await self._shared.put(policy, name)

    async def spread(self, name: str, replicas: Sequence[Replica]) -> None:
        """Servers that do not get it are given it later, one by one."""
        try:
            await self._send(name, replicas)
        except BackendDied as error:
            logger.warning("Not all servers got what was published at once; they are updated one by one. %s", error)

    async def give(self, name: str, replica: Replica) -> str:
        if not (path := await replica.api.received_weights(name)):
            await self._send(name, [replica])
            path = await replica.api.received_weights(name)
        return path

    async def take_back(self, name: str, replica: Replica) -> None:
        await replica.api.drop_weights(name)

    async def forget(self, name: str) -> None:
        await self._shared.forget(name)

    async def close(self) -> None:
        await self._sender.end()

    async def _send(self, name: str, replicas: Sequence[Replica]) -> None:
        """To all these in one group. Raises BackendDied when it broke."""
        if not replicas:
            return
        async with self._lock:
            folder = self._folder / name
            terms = Terms(
                host=_address_towards(replicas),
                port=0,
                size=1 + len(replicas),
                backend=self._backend,
                seconds=self._seconds,
                files=await asyncio.to_thread(files_of, folder),
            )
            tasks: list[asyncio.Task[None]] = []
            try:
                words = (await self._sender.offer(folder, terms)).dump()
                calls = [r.api.receive_weights(name, words, rank, self._root(r)) for rank, r in enumerate(replicas, 1)]
                tasks = [asyncio.create_task(call) for call in (self._sender.sent(), *calls)]
                await asyncio.gather(*tasks)
                self.published_bytes += len(replicas) * bytes_in(folder)
            except BaseException:
                await self._break_up(tasks)
                raise

    async def _break_up(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """All connections end with the sender, so that no member waits for one that is gone."""
        await self._sender.end()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_END_SECONDS)
            for task in late:
                task.cancel()

    def _root(self, replica: Replica) -> str:
        """Where it writes. One of ours writes where its files are removed when the run ends, however that ends; one
        that somebody else started has a place in its machine's memory, which is emptied when it begins again."""
        slug = re.sub(r"\W+", "-", replica.name).lower()
        return str(self._folder / slug) if replica.process is not None else f"agl-weights-{slug}"


def _address_towards(replicas: Sequence[Replica]) -> str:
    """This machine's, as the servers see it."""
    found = {own_address(replica.api.host) for replica in replicas}
    return min(found, key=lambda address: (address.startswith("127."), address))
