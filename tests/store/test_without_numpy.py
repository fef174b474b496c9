"""The store without numpy: what it stores and what goes over the wire is the same, byte for byte."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import agentlightning as agl
from agentlightning.store.http.wire import encode_records, encode_table

from .builders import make_call, make_segment

WITHOUT = """
import asyncio, sys
from pathlib import Path

sys.modules["numpy"] = None
import agentlightning as agl
from agentlightning.store.http.wire import decode_records, encode_records, encode_table

folder = Path(sys.argv[1])


async def main():
    sent = (folder / "records").read_bytes()
    records = decode_records(sent)
    assert encode_records(records) == sent
    store = agl.InMemoryLightningStore()
    await store.start_rollout(1, rollout_id="ro", attempt_id="at")
    await store.add_calls(records)
    first, second = (await store.query_calls(["ro"]))["ro"]
    print(first.prompt_ids.tolist(), second.prompt_ids.tolist(), second.response_ids.tolist())
    print(second.logprobs.tolist(), second.plain_logprobs.tolist(), first.prompt_ids.readonly)
    (folder / "table").write_bytes(encode_table(await store.fetch_calls(["ro"])))
    await store.close()


asyncio.run(main())
"""


async def with_numpy(folder: Path) -> bytes:
    """Stores two calls here; returns what the store says of them, and leaves them for the other process."""
    store = agl.InMemoryLightningStore()
    claim = await store.start_rollout(1, rollout_id="ro", attempt_id="at")
    said = [make_segment("p", None, 0, [1, 2, 3]), make_segment("r", "p", 3, [4, 5], version=1)]
    more = [make_segment("q", "r", 1, [6]), make_segment("s", "q", 1, [7, 8], version=2)]
    records = [make_call(claim, "one", "p", "r", *said), make_call(claim, "two", "q", "s", *more)]
    (folder / "records").write_bytes(encode_records(records))
    await store.add_calls(records)
    table = encode_table(await store.fetch_calls(["ro"]))
    await store.close()
    return table


@pytest.mark.slow
def test_stores_and_sends_the_same_bytes(tmp_path: Path) -> None:
    table = asyncio.run(with_numpy(tmp_path))
    done = subprocess.run([sys.executable, "-c", WITHOUT, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1, 2, 3] [1, 2, 3, 4, 6] [7, 8]", "[-0.0, -1.0] [-1.0, -2.0] True"]
    stored = (tmp_path / "table").read_bytes()
    assert msgspec.msgpack.decode(stored) == msgspec.msgpack.decode(table)
    assert len(stored) == len(table)
