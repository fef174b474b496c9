"""Python graders in the real sandbox: what they may do, what they may not, and what is said of those that fail."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import GraderRefused
from agentlightning.finetuning.graders import Grade, GraderSettings, Sample, grade, parse_grader, run_grader
from agentlightning.finetuning.graders.python import (
    MOST_SANDBOXES,
    _BrokenSandbox,  # pyright: ignore[reportPrivateUsage]
    _Sandbox,  # pyright: ignore[reportPrivateUsage]
)
from agentlightning.finetuning.graders.sandboxed import empty
from agentlightning.litagent.bubblewrap import Bubblewrap, check_bubblewrap
from agentlightning.litagent.isolation import Container

QUICK = GraderSettings(seconds=2.0, memory_bytes=512 * 1024**2, file_bytes=1024**2)
SAMPLE = Sample.of_text('{"x": 3}')


@pytest.fixture(autouse=True, scope="module")
def bubblewrap_works() -> None:
    check_bubblewrap()


def python(source: str, **more: Any) -> dict[str, Any]:
    return {"type": "python", "name": "p", "source": textwrap.dedent(source), **more}


async def graded(source: str, settings: GraderSettings = QUICK, **item: Any) -> Grade:
    return await grade(parse_grader(python(source), settings=settings), item, SAMPLE)


async def test_it_sees_the_sample_and_the_item() -> None:
    source = """
        import json
        def grade(sample, item) -> float:
            assert json.loads(sample["output_text"]) == sample["output_json"]
            assert sample["output_tools"] == [] and len(sample["choices"]) == 1
            return sample["output_json"]["x"] / item["a"]["b"]
        """
    assert (await graded(source, a={"b": 4})).reward == 0.75


@pytest.mark.parametrize(
    ("returned", "reward"),
    [("True", 1.0), ("2", 2.0), ("__import__('decimal').Decimal('0.5')", 0.5), ("-1e-9", -1e-9)],
)
async def test_what_is_a_number_is_the_reward(returned: str, reward: float) -> None:
    assert (await graded(f"def grade(sample, item): return {returned}")).reward == reward


HOSTILE = {
    "raises": ("raise KeyError('zz')", "KeyError"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "leaves": ("import os; os._exit(0)", "RuntimeError"),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", "RuntimeError"),
    "kills its parent": ("import os; os.kill(os.getppid(), 9); import time; time.sleep(9)", "sandbox"),
    "a string": ("return '1'", "TypeError"),
    "nothing": ("return None", "TypeError"),
    "a list": ("return [1]", "TypeError"),
    "not a number": ("return float('nan')", "ValueError"),
    "infinite": ("return float('inf')", "ValueError"),
    "enormous": ("return 10 ** 400", "OverflowError"),
    "recurses": ("return grade(sample, item)", "RecursionError"),
    "sleeps": ("import time; time.sleep(1000)", "TimeoutError"),
    "spins": ("while True: pass", "TimeoutError"),
    "prints": ("while True: print('x' * 1000)", "TimeoutError"),
    "allocates": ("x = [bytes(2 ** 26) for _ in range(10 ** 6)]", "MemoryError"),
    "fills a file": ("open('/tmp/f', 'wb').write(bytes(2 ** 23))", "OSError"),
    "fills files": ("[open(f'f{n}', 'wb').write(bytes(2 ** 19)) for n in range(9)]", "OSError"),
    "forks": ("import os\n    while True: os.fork()", "BlockingIOError"),
    "writes outside": ("open('/usr/x', 'w')", "OSError"),
    "reads the shadow": ("open('/etc/shadow').read()", "PermissionError"),
    "network": ("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", "ConnectionRefusedError"),
    "the name service": ("import socket; socket.getaddrinfo('example.com', 80)", "gaierror"),
    "a process": ("import subprocess; subprocess.run(['mount', '-t', 'tmpfs', 'x', '/tmp'], check=True)", "CalledProc"),
    "its parent's answer": (
        "import os\n    for f in os.listdir(place := f'/proc/{os.getppid()}/fd'):\n        try: os.write("
        "os.open(f'{place}/{f}', os.O_WRONLY | os.O_NONBLOCK), b'[' * 50_000 + b'\\n')\n        except OSError: pass",
        "",
    ),
    "its answer": (
        "import os\n    for f in range(3, 9):\n        try: os.write(f, b'[]\\n')\n        except OSError: pass",
        "",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_grader_is_flagged_and_harms_nobody(name: str, tmp_path: Path) -> None:
    source, said = HOSTILE[name]
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    source = source.replace("PORT", str(server.sockets[0].getsockname()[1]))
    hostile = f"def grade(sample, item):\n    if item.get('ok'): return 1.0\n    {source}"
    grader = parse_grader(python(hostile), settings=QUICK)
    others = [grade(grader, {"ok": True}, SAMPLE) for _ in range(4)]
    found, *fine = await asyncio.gather(grade(grader, {}, SAMPLE), *others, grade(grader, {"ok": True}, SAMPLE))
    server.close()
    assert found.reward is None
    assert found.errors.flags == ["python_grader_runtime_error"], found
    assert said in (found.errors.python_grader_runtime_error_details or "")
    assert found.why == found.errors.python_grader_runtime_error_details
    assert [one.reward for one in fine] == [1.0] * 5


async def test_the_environment_and_our_files_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("x")
    monkeypatch.setenv("SECRET_KEY", "x")
    source = f"""
        import os
        def grade(sample, item):
            seen = os.path.exists({str(tmp_path / "secret")!r}) + ("SECRET_KEY" in os.environ)
            for process in filter(str.isdigit, os.listdir("/proc")):
                try:
                    seen += "SECRET_KEY" in open(f"/proc/{{process}}/environ").read()
                except OSError:
                    pass
            return seen
        """
    found = await graded(source)
    assert found.reward == 0.0, found.why


async def test_each_sample_has_globals_and_files_of_its_own() -> None:
    source = """
        import collections, os
        seen = collections.Counter()
        def grade(sample, item):
            seen["x"] += 1
            left = [name for name in (*os.listdir("."), *os.listdir("/dev/shm")) if name.startswith("left")]
            for folder in (".", "/tmp", "/dev/shm"):
                open(os.path.join(folder, "left"), "a").write("x")
            collections.left = getattr(collections, "left", 0) + 1
            if os.fork() == 0:
                os.setsid()
                os.execvpe("sleep", ["sleep", "1000"], {})
            return seen["x"] + len(left) + collections.left + os.path.getsize("/tmp/left")
        """
    rewards = [(await graded(source)).reward for _ in range(3)]
    assert rewards == [3.0, 3.0, 3.0]


def _processes(folder: Path) -> int:
    found = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = entry.read_bytes()
            found += b"PR_SET_CHILD_SUBREAPER" in command and str(folder).encode() in command
    return found


def test_many_samples_share_a_warm_sandbox_and_the_end_of_the_loop_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def in_a_loop_of_its_own() -> None:
        source = "import os\ndef grade(sample, item): return os.getppid() + item['n'] / 1000"
        found = await asyncio.gather(*(graded(source, n=n) for n in range(100)))
        rewards = [one.reward for one in found if one.reward is not None]
        assert [round(r % 1 * 1000) for r in rewards] == list(range(100))
        assert len({int(r) for r in rewards}) <= QUICK.processes
        assert _processes(tmp_path) > 0

    asyncio.run(in_a_loop_of_its_own())
    assert _processes(tmp_path) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mounted", [False, True])
def test_what_a_sample_leaves_is_deleted_and_what_is_mounted_is_left_alone(tmp_path: Path, mounted: bool) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("left")
    (tmp_path / "link").symlink_to("/")
    empty(str(tmp_path), device=-1 if mounted else None)
    assert (tmp_path / "a" / "b" / "file").exists() is mounted
    assert [entry.name for entry in tmp_path.iterdir()] == (["a"] if mounted else [])


async def test_many_graders_share_the_places_of_sandboxes() -> None:
    sources = [f"def grade(sample, item): return {n}" for n in range(MOST_SANDBOXES + 8)]
    found = await asyncio.gather(*(graded(source) for source in sources))
    assert [one.reward for one in found] == list(range(len(sources)))


async def test_who_gives_up_leaves_the_others_their_answers() -> None:
    source = "import time\ndef grade(sample, item): time.sleep(item['s']); return item['s']"
    tasks = [asyncio.create_task(graded(source, s=s)) for s in (0.5, 0.5, 0.1, 0.2)]
    await asyncio.sleep(0.3)
    for task in tasks[:3]:
        task.cancel()
    assert (await tasks[3]).reward == 0.2


async def test_an_image_is_an_interpreter_of_the_owners() -> None:
    source = "import numpy\ndef grade(sample, item): return numpy.float32(0.5)"
    with pytest.raises(GraderRefused) as refused:
        parse_grader(python(source, image_tag="2025-05-08"), settings=QUICK)
    assert refused.value.param == "grader.image_tag"
    import numpy

    installed = Path(numpy.__file__).parents[1]
    settings = GraderSettings(isolation=Bubblewrap(read=[installed]), images={"2025-05-08": sys.executable})
    found = await grade(parse_grader(python(source, image_tag="2025-05-08"), settings=settings), {}, SAMPLE)
    assert found.reward == 0.5, found.why


@pytest.mark.parametrize(
    ("source", "param"),
    [
        ("def grade(sample, item) return 1", "grader.source"),
        ("def score(sample, item): return 1", "grader.source"),
        ("grade = '" + "x" * 256 * 1024 + "'", "grader.source"),
        ("grade\0", "grader.source"),
        ("grade = " + "(" * 5000, "grader.source"),
    ],
)
def test_what_is_no_grader_is_refused(source: str, param: str) -> None:
    with pytest.raises(GraderRefused) as refused:
        parse_grader(python(source))
    assert refused.value.param == param


async def test_without_a_wall_only_where_the_owner_says_so() -> None:
    alone = GraderSettings(isolation=None, seconds=2.0)
    source = "import os\ndef grade(sample, item): return os.path.exists(item['path'])"
    assert (await graded(source, alone, path=str(Path(__file__)))).reward == 1.0
    assert (await graded("import time\ndef grade(sample, item): time.sleep(9)", alone)).reward is None
    with pytest.raises(GraderRefused):
        parse_grader(python(source), settings=GraderSettings(isolation="docker"))  # pyright: ignore[reportArgumentType]


async def test_a_sandbox_that_cannot_be_made_is_the_servers_fault() -> None:
    for settings in (GraderSettings(isolation=Container(["false"])), GraderSettings(python="/nothing/python")):
        found = await graded("def grade(sample, item): return 1", settings)
        assert found.errors.flags == ["python_grader_server_error"]
        assert found.errors.python_grader_server_error_type


async def test_graders_run_shows_what_a_grader_raised() -> None:
    body = {"grader": python("def grade(sample, item):\n    return item['zz']"), "model_sample": "x", "item": {}}
    errors = (await run_grader(body))["metadata"]["errors"]
    assert errors["python_grader_runtime_error"]
    assert errors["python_grader_runtime_error_details"] == "KeyError: 'zz' (grader.py, line 2, in grade)"


async def test_an_answer_nested_without_end_breaks_its_sandbox() -> None:
    pipe, says = asyncio.subprocess.PIPE, "input(); print('[' * 50_000)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", says, stdin=pipe, stdout=pipe, stderr=pipe)
    with pytest.raises(_BrokenSandbox, match="broke: RecursionError"):
        await _Sandbox(process, 5).start("")
    await process.communicate()
