"""`agl store`: moving, forgetting, keys and serving, as a user types them."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.errors import ConfigError
from agentlightning.keys import verify_attempt_key
from agentlightning.store import LightningStoreClient, SqliteLightningStore
from agentlightning.types import AttemptStatus
from tests.store.builders import make_call, make_segment, make_span
from tests.typed import typed


async def _fill(path: Path) -> None:
    store = SqliteLightningStore(path)
    for n in range(7):
        claim = await store.start_rollout({"n": n, "text": "ü\n"}, metadata={"group": "g"})
        await store.add_span(make_span(claim, "step", note="x"))
        segments = make_segment("p", None, 0, [1, 2]), make_segment("r", "p", 2, [3], 1)
        await store.add_calls([make_call(claim, "c", "p", "r", *segments)])
        await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
    await store.enqueue_rollout("waits")
    await store.close()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    asyncio.run(_fill(tmp_path / "store.db"))
    return tmp_path


def agl(folder: Path, *arguments: str) -> str:
    """Run a command; returns what it printed, or raises with it."""
    done = typed(folder, "-m", "agentlightning", "store", *arguments, environment={"COLUMNS": "80"})
    if done.returncode:
        assert "Traceback" not in done.stderr
        raise ConfigError(done.stderr)
    return done.stdout


@pytest.mark.parametrize(
    ("source", "text", "words"),
    [
        ("a.jsonl", '\n{"question": "1 + 1"}\n', "a.jsonl, line 2: This line is not an exported rollout"),
        ("b.jsonl", "{\n", "b.jsonl, line 1: This line is not an exported rollout"),
        ("folder/tasks.jsonl", "1\n", "folder"),
    ],
)
def test_what_cannot_be_imported_leaves_no_store(tmp_path: Path, source: str, text: str, words: str) -> None:
    (tmp_path / source).parent.mkdir(exist_ok=True)
    (tmp_path / source).write_text(text)
    done = typed(tmp_path, "-m", "agentlightning", "store", "--path", "new.db", "import", source.split("/")[0])
    assert done.returncode == 1
    assert words in " ".join(done.stderr.split())
    assert not (tmp_path / "new.db").exists()


@pytest.mark.parametrize("target", ["out.jsonl", "out"])
def test_what_is_exported_is_imported_whole(filled: Path, target: str) -> None:
    assert "Exported 7 finished rollouts" in agl(filled, "export", target)
    assert "Imported 7 rollouts" in agl(filled, "--path", "new.db", "import", target)
    assert "Imported 0 rollouts into new.db; 7 were there" in agl(filled, "--path", "new.db", "import", target)
    agl(filled, "--path", "new.db", "export", "again.jsonl")
    if target.endswith(".jsonl"):
        assert (filled / "again.jsonl").read_bytes() == (filled / target).read_bytes()
    else:
        agl(filled, "export", "direct.jsonl")
        assert (filled / "again.jsonl").read_bytes() == (filled / "direct.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        agl(filled, "export", target)


def test_parquet_is_readable_without_us(filled: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    agl(filled, "export", "out")
    assert pq.read_table(filled / "out" / "rollouts.parquet").num_rows == 7
    ids = pq.read_table(filled / "out" / "segments.parquet").column("ids").to_pylist()
    assert ids[:2] == [b"\x01\0\0\0\x02\0\0\0", b"\x03\0\0\0"]


def test_parquet_files_that_do_not_belong_together_are_refused(filled: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    agl(filled, "export", "out")
    spans = pq.read_table(filled / "out" / "spans.parquet")
    pq.write_table(spans.take(list(reversed(range(len(spans))))), filled / "out" / "spans.parquet")
    with pytest.raises(ConfigError, match="sorted in another order"):
        agl(filled, "--path", "new.db", "import", "out")
    (filled / "out" / "calls.parquet").unlink()
    with pytest.raises(ConfigError, match=r"calls\.parquet is missing"):
        agl(filled, "--path", "new.db", "import", "out")


def test_the_store_may_be_named_before_a_command_or_after_it(filled: Path) -> None:
    (filled / "store.db").rename(filled / "mine.db")
    before, after = agl(filled, "--path", "mine.db", "statistics"), agl(filled, "statistics", "--path", "mine.db")
    assert before == after
    with pytest.raises(ConfigError, match=r"There is no store 'yours\.db'"):
        agl(filled, "export", "to.jsonl", "--path", "yours.db")


def test_a_mistake_in_a_command_came_through_no_line_of_the_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        agl(tmp_path, "export", "to.jsonl")
    assert "It came through" not in str(caught.value)


def test_stats_and_prune(filled: Path) -> None:
    assert re.search(r"rollouts\W+8\b", agl(filled, "stats"))
    assert "Deleted 4" in agl(filled, "prune", "--keep", "3")
    assert "Deleted 0" in agl(filled, "prune", "--older-than", "1h")
    assert re.search(r"queuing\W+1\b", agl(filled, "stats"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path", "none.db", "stats"], "There is no store 'none.db'"),
        (["--path", "a", "--dsn", "postgresql://u:p@h/d", "stats"], "not both"),
        (["prune"], "Say what to forget"),
        (["prune", "--older-than", "soon"], "not a duration"),
        (["import", "nothing.jsonl"], "There is no 'nothing.jsonl'"),
        (["--host", "0.0.0.0"], "Give an admin_key"),
        (["--no-key", "--secret-file", "s"], "give an admin_key too"),
        (["--no-key", "--key", "k"], "only those who have the key"),
        (["key", "r", "a", "--secret-file", "none"], "There is no secret"),
    ],
)
def test_mistakes_are_named(filled: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agl(filled, *arguments)


@pytest.fixture
def served(filled: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "agentlightning", "store", "--port", "0", "--key", "k", "--secret-file", "secret"]
    with subprocess.Popen(command, cwd=filled, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield next(m for line in process.stdout if (m := re.search(r"at (http://\S+)", line)))[1]
        process.send_signal(signal.SIGTERM)
        assert "Stopped." in process.stdout.read()
        assert process.wait(timeout=30) == 0


@pytest.mark.slow
async def test_serving_with_a_key(filled: Path, served: str) -> None:
    client = LightningStoreClient(served, key="k")
    claim = await client.dequeue_rollout("w")
    await client.close()
    assert claim is not None
    assert (filled / "secret").stat().st_mode & 0o777 == 0o600
    secret = bytes.fromhex((filled / "secret").read_text())
    own = claim.rollout_id, claim.attempt.attempt_id
    key = agl(filled, "key", *own, "--secret-file", "secret", "--scope", "spans").strip()
    verified = verify_attempt_key(secret, key)
    assert verified is not None
    assert (verified.rollout_id, verified.attempt_id, verified.scopes) == (*own, ("spans",))
    agent = LightningStoreClient(served, key=key)
    assert await agent.add_span(make_span(claim)) is not None
    await agent.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "mongo"), "MongoDB is not supported"),
        (("--backend", "postgres"), "needs --dsn"),
        (("--backend", "memory", "--path", "x.db"), "leave --path out"),
        (("--backend", "redis"), "sqlite, postgres or memory"),
        (("--log-level", "loud"), "DEBUG, INFO"),
    ],
)
def test_a_backend_that_cannot_be_is_refused(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        agl(tmp_path, *arguments, "stats")


def test_a_store_in_memory_leaves_no_file(tmp_path: Path) -> None:
    assert "rollouts" in agl(tmp_path, "--backend", "memory", "--log-level", "info", "stats").lower()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "words"), [("prometheus", "/metrics"), ("vllm", "agl gateway --upstream")])
def test_commands_that_are_not_needed_say_what_is(tmp_path: Path, command: str, words: str) -> None:
    line = [sys.executable, "-m", "agentlightning", command, "--port", "4748", "x"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert words in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cors-origin", "http://a", "--cors-origin", "http://b"], "put a proxy in front"),
        (["--tracker", "console"], "counters are at /metrics"),
        (["--tracker", "prometheus", "console"], "counters are at /metrics"),
        (["--n-workers", "4"], "start several `agl store --dsn"),
        (["--mongo-uri", "mongodb://localhost:27017"], "Several machines share PostgreSQL: --dsn"),
    ],
)
def test_options_of_older_versions_say_what_to_do(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(app, ["store", *arguments]).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)
    assert "\n" not in str(error)


def test_options_of_older_versions_that_have_a_meaning_are_taken(filled: Path) -> None:
    asked = ["store", "--path", str(filled / "store.db"), "--tracker", "prometheus", "--n-workers", "1", "statistics"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
