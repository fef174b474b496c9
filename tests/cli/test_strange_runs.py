"""Run folders that were copied from elsewhere, damaged, or made by somebody to do harm: `agl runs`, `agl compare`."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentlightning import cli
from agentlightning.cli import app
from agentlightning.cli.curve import plot
from agentlightning.errors import ConfigError
from agentlightning.files import atomic_write, open_private
from agentlightning.metrics.sink import JsonlSink, read_metrics
from agentlightning.metrics.svg import curve_svg, points_of
from agentlightning.models import resolve_model
from agentlightning.trainer.log import logged
from tests.typed import typed

STEPS = [{"step": n, "reward": 0.5, "val_reward": 0.5, "time": 100.0 + n, "outcomes": {"ok": 4}} for n in (1, 2)]


def write_run(folder: Path, steps: list[dict[str, Any]] = STEPS, **about: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"run_id": "run-1", "algorithm": "GRPO", "settings": {}, **about}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def looked_at(folder: Path, *arguments: str) -> tuple[int, str]:
    done = typed(folder, "-m", "agentlightning", *arguments, timeout=60)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    return done.returncode, said


ODD_FILES = {
    "nested lists": b"[" * 100_000 + b"\n",
    "nested objects": b'{"a":' * 3_000 + b"1" + b"}" * 3_000 + b"\n",
    "a list": b"[[1, 2], 3]\n",
    "null": b"null\n",
    "no text": b"\xff\xfe\x00\n",
    "a number of many digits": b'{"step": ' + b"9" * 6_000 + b', "url": 1, "key": null, "pid": 1}\n',
    "a pipe": None,
    "a terabyte": 2**40,
}


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "live.json"])
def test_an_odd_file_of_one_run_hides_no_other_run(name: str, tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    for number, content in enumerate(ODD_FILES.values()):
        odd = write_run(tmp_path / f"odd-{number}") / name
        odd.unlink(missing_ok=True)
        if content is None:
            os.mkfifo(odd)
        elif isinstance(content, bytes):
            odd.write_bytes(content)
        else:
            with odd.open("wb") as file:
                file.truncate(content)
    status, said = looked_at(tmp_path, "runs", ".", "--json")
    rows = {Path(row["folder"]).name: row for row in json.loads(said)}
    assert (status, rows["good"]["status"], len(rows)) == (0, "ended", len(ODD_FILES) + 1)
    if name == "metrics.jsonl":  # a pipe is no file of metrics
        damaged = {kind for number, kind in enumerate(ODD_FILES) if rows[f"odd-{number}"]["status"] == "damaged"}
        assert damaged == {*ODD_FILES} - {"a pipe"}
        assert "metrics.jsonl is damaged: line 1" in looked_at(tmp_path, "compare", "good", "odd-0")[1]


ODD_VALUES: list[Any] = ["\x1b]0;x\x07", [], {}, [[1]], float("nan"), 10**400, None, True, -1]


def test_odd_values_of_metrics_are_named_or_left_out(tmp_path: Path) -> None:
    names = ("step", "reward", "val_reward", "time")
    for name in names:
        for number, value in enumerate(ODD_VALUES):
            write_run(tmp_path / f"{name}-{number}", [{**step, name: value} for step in STEPS])
    status, said = looked_at(tmp_path, "runs", ".", "--json")
    assert (status, len(json.loads(said))) == (0, len(ODD_VALUES) * len(names))
    looked_at(tmp_path, "compare", "reward-4", "reward-5")


def test_a_pipe_in_the_place_of_a_checkpoint_holds_nobody_up(tmp_path: Path) -> None:
    checkpoint = write_run(tmp_path / "run") / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    os.mkfifo(checkpoint / "checkpoint.json")
    status, said = looked_at(tmp_path, "export", str(tmp_path / "run"), "--to", "model")
    assert (status, "Error: " in said, (tmp_path / "model").exists()) == (1, True, False), said


def test_a_link_in_a_checkpoint_is_not_published(tmp_path: Path) -> None:
    """It may lead to any file of whoever exports somebody else's run."""
    checkpoint = write_run(tmp_path / "run") / "checkpoints" / "step-000001"
    shutil.copytree(resolve_model("calc"), checkpoint / "model")
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": 1, "base_model": "calc", "seed": 0}))
    (tmp_path / "secret").write_text("mine")
    (checkpoint / "model" / "notes.txt").symlink_to(tmp_path / "secret")
    status, said = looked_at(tmp_path, "export", str(tmp_path / "run"), "--to", "model")
    assert (status, "notes.txt is a link" in said, (tmp_path / "model").exists()) == (1, True, False), said
    (checkpoint / "model" / "notes.txt").unlink()
    assert looked_at(tmp_path, "export", str(tmp_path / "run"), "--to", "model")[0] == 0


def test_settings_that_are_none_differ_in_nothing(tmp_path: Path) -> None:
    good, odd = write_run(tmp_path / "good"), write_run(tmp_path / "odd", settings=[1])
    assert looked_at(tmp_path, "compare", str(good), str(odd))[0] == 0


def test_of_very_many_settings_only_the_first_are_printed(tmp_path: Path) -> None:
    good, odd = write_run(tmp_path / "good"), write_run(tmp_path / "odd", settings={f"k{n}": n for n in range(9_000)})
    status, said = looked_at(tmp_path, "compare", str(good), str(odd))
    assert (status, "k499 " in said, "k500 " in said) == (0, True, False)
    assert "8,500 others: --json has them all" in " ".join(said.split())


def test_what_is_not_finite_has_no_place_in_a_picture() -> None:
    steps = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": float("inf")}, {"step": 3, "loss": 1}]
    assert points_of(steps, "loss") == [(3.0, 1.0)]


@pytest.mark.parametrize("values", [(1e308, -1e308), (1e17, 1e17), (1e299, -1e299), (5e-324, 0.0), (-1e200, -1e200)])
def test_numbers_of_every_size_are_drawn_or_left_out(values: tuple[float, float]) -> None:
    points = points_of([{"step": n, "loss": value} for n, value in enumerate(values)], "loss")
    assert len(points) == (0 if abs(values[0]) > 1e300 else 2)
    drawn = curve_svg({"loss": points}) + plot({"loss": points}, 60).plain
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_a_long_curve_takes_no_time_with_its_square() -> None:
    began = time.process_time()
    assert "step 19999" in plot({"loss": [(float(n), float(n)) for n in range(20_000)]}, 60).plain
    assert time.process_time() - began < 3


def test_a_line_that_no_run_writes_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1, "reward": "high"}\n{"step": 2')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is damaged: line 2 .*'reward' is no number"):
        read_metrics(file)


def test_a_run_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    run = write_run(tmp_path / "run")
    for name in ("log.txt", "store.db.lock"):
        (run / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"log\.txt is a link"), logged(run / "log.txt"):
        pass
    with pytest.raises(ConfigError, match=r"store\.db\.lock is a link"):
        open_private(run / "store.db.lock", "a+")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(tmp_path / "other")  # which is replaced, and not written through
    JsonlSink(run / "metrics.jsonl").close()
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("number", "words"), [(errno.EROFS, "Give a folder that can be"), (errno.ENOSPC, "Make room")])
def test_what_helps_against_a_file_that_cannot_be_written_is_said(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise OSError(number, os.strerror(number), "/mnt/model")

    monkeypatch.setattr(app, "app", fails)
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert said.startswith(f"Error: '/mnt/model' could not be written: {os.strerror(number)}. {words}")


def test_a_full_disk_is_named_and_leaves_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("old")
    script = (
        "import resource, signal, sys; from pathlib import Path; from agentlightning import cli, files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from agentlightning.cli import runs\n"
        "sys.argv = ['agl', 'runs']\n"
        "import agentlightning.cli.app as app\n"
        "app.app = lambda: files.atomic_write(Path('run.json'), 'x' * 10_000)\n"
        "cli.main()\n"
    )
    done = typed(tmp_path, "-c", script)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "run.json' could not be written: File too large." in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "old"
    atomic_write(tmp_path / "run.json", "new")
    assert (tmp_path / "run.json").read_text() == "new"


@pytest.mark.parametrize(("folder", "words"), [("run.json", "Is a directory"), ("none", None)])
def test_a_path_that_cannot_be_used_is_named(
    tmp_path: Path,
    folder: str,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where something else is wrong, it is a fault of ours, and shown whole."""
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(app, "app", (tmp_path / "run.json").read_bytes)
    monkeypatch.setattr(sys, "argv", ["agl", "runs"])
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert ("Traceback" in said) == (words is None)
    assert f"Error: '{tmp_path / 'run.json'}' cannot be used: {words}. (AGL_DEBUG=1" in said or words is None
