"""Copies of checkpoints at a URL: whole or not there, pruned alike, tried again; another machine goes on from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import agentlightning as agl
from agentlightning.algorithm.checkpoint import CHECKPOINT_FILE, list_checkpoints, prune_checkpoints, read_checkpoint
from agentlightning.algorithm.parts.checkpoint_copy import CheckpointCopy, fetch_newest
from agentlightning.errors import ConfigError
from agentlightning.metrics.sink import METRICS_FILE, RUN_FILE
from agentlightning.trainer.folder import checkpoint_of

pytestmark = pytest.mark.skipif(find_spec("fsspec") is None, reason="fsspec is in the extra `fsspec`")
KEEP = 2


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Where a bucket of a server on loopback is that speaks S3."""
    pytest.importorskip("s3fs", reason="s3:// needs `pip install s3fs 'moto[s3,server]'`")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environment.setenv(name, "test")
        files, _ = opened("s3://agl-test/run")
        files.mkdir("agl-test")
        yield "s3://agl-test"
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{uuid4()}/run"
    return f"file://{tmp_path}/shared/run" if request.param == "file" else f"memory://{uuid4()}/run"


def new_run(folder: Path, run_id: str = "run-1") -> Path:
    folder.mkdir(parents=True)
    (folder / RUN_FILE).write_text(json.dumps({"run_id": run_id}))
    return folder


def save(run_dir: Path, step: int, reward: float | None = None, content: str = "") -> None:
    checkpoint = run_dir / "checkpoints" / f"step-{step:06d}"
    (checkpoint / "model" / "policy").mkdir(parents=True, exist_ok=True)
    (checkpoint / "model" / "policy" / "weights").write_text(content or f"weights {step}")
    info = {"step": step, "base_model": "m", "seed": 0, "val_reward": reward, "weights": content or f"{step}"}
    (checkpoint / CHECKPOINT_FILE).write_text(json.dumps(info))
    (run_dir / METRICS_FILE).write_text("".join(f'{{"step": {n}}}\n' for n in range(step + 1)))
    prune_checkpoints(run_dir, KEEP)


def tree(files: Any, root: str) -> dict[str, bytes]:
    root = root.rstrip("/")
    return {path.removeprefix(root): files.cat_file(path) for path in files.find(root)}


def opened(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    return url_to_fs(url)


def here(run_dir: Path) -> dict[str, bytes]:
    found = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    return {"/" + str(path.relative_to(run_dir)).removeprefix("checkpoints/"): text for path, text in found.items()}


async def test_there_is_what_the_folder_has_after_each_step_the_best_one_among_it(tmp_path: Path, url: str) -> None:
    run_dir, copy = new_run(tmp_path / "a"), CheckpointCopy(url, KEEP)
    for step, reward in enumerate([0.1, 0.9, None, 0.2, 0.3]):
        save(run_dir, step, reward)
        assert await copy.update(run_dir) is None
        assert tree(*opened(url)) == here(run_dir)
    assert [read_checkpoint(c).step for c in list_checkpoints(run_dir)] == [1, 3, 4]


async def test_another_machine_goes_on_and_what_came_later_in_another_course_leaves(tmp_path: Path, url: str) -> None:
    first = new_run(tmp_path / "a")
    for step, reward in enumerate([0.9, 0.1, 0.2, 0.3]):
        save(first, step, reward)
        assert await CheckpointCopy(url, KEEP).update(first) is None
    second = tmp_path / "b"
    found = checkpoint_of(agl.GRPO(model="calc"), url, second)
    assert found == second / "checkpoints" / "step-000003"
    assert {p: t for p, t in here(first).items() if not p.startswith(("/step-000000", "/step-000002"))} == here(second)
    save(second, 4, 0.1)
    assert await CheckpointCopy(url, KEEP).update(second) is None
    kept = {path.split("/")[1] for path in tree(*opened(url))} - {METRICS_FILE, RUN_FILE}
    assert kept == {"step-000000", "step-000003", "step-000004"}, "the best one is not on this machine"
    third = new_run(tmp_path / "c")  # the same run, gone on with from step 2
    save(third, 2, 0.2)
    save(third, 3, 0.3, content="of another course")
    assert await CheckpointCopy(url, KEEP).update(third) is None
    files = tree(*opened(url))
    assert files["/step-000003/model/policy/weights"] == b"of another course"
    assert not any(path.startswith("/step-000004") for path in files)


@pytest.mark.parametrize("damage", ["no json", "half a json", "a json of something else"])
async def test_half_a_copy_is_none_and_is_made_whole(tmp_path: Path, url: str, damage: str) -> None:
    run_dir, copy = new_run(tmp_path / "a"), CheckpointCopy(url, KEEP)
    save(run_dir, 1)
    await copy.update(run_dir)
    save(run_dir, 2)
    await copy.update(run_dir)
    files, root = opened(url)
    last = f"{root}/step-000002/{CHECKPOINT_FILE}"
    if damage == "no json":
        files.rm_file(last)
    else:
        files.pipe_file(last, b'{"step"' if damage == "half a json" else b"[]")
    files.pipe_file(f"{root}/step-000002/model/left-over", b"")
    assert fetch_newest(url, tmp_path / "b").name == "step-000001"
    assert await copy.update(run_dir) is None
    assert tree(files, root) == here(run_dir)


async def test_a_copy_that_fails_says_why_and_is_made_the_next_time(tmp_path: Path) -> None:
    run_dir, place = new_run(tmp_path / "a"), tmp_path / "shared"
    place.write_text("in the way")
    copy = CheckpointCopy(f"file://{place}/run", KEEP)
    save(run_dir, 1)
    problem = await copy.update(run_dir)
    assert problem is not None
    assert str(place) in problem
    place.unlink()
    save(run_dir, 2)
    assert await copy.update(run_dir) is None
    assert tree(*opened(copy.url)) == here(run_dir)


async def test_each_run_has_a_url_of_its_own(tmp_path: Path, url: str) -> None:
    first, second = new_run(tmp_path / "a"), new_run(tmp_path / "b", "run-2")
    save(first, 1)
    save(second, 7)
    await CheckpointCopy(url, KEEP).update(first)
    before = tree(*opened(url))
    with pytest.raises(ConfigError, match="run-1"):
        await CheckpointCopy(url, KEEP).update(second)
    with pytest.raises(ConfigError, match="another run"):
        fetch_newest(url, second)
    assert tree(*opened(url)) == before


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: agl.GRPO(model="calc", checkpoint_copy="/a/path"),
        lambda: agl.GRPO(model="calc", checkpoint_copy="nobody-knows://a/path"),
        lambda: agl.Trainer(algorithm=agl.GRPO(model="calc"), resume="memory://nothing/there"),
    ],
)
def test_places_that_cannot_be_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        wrong()
