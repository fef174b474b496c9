"""A run's log file: it has everything, and the terminal no more than before."""

from __future__ import annotations

import io
import logging
from pathlib import Path

from agentlightning.trainer.log import logged


def test_the_file_has_everything_and_the_terminal_what_it_had(tmp_path: Path) -> None:
    terminal, root = logging.StreamHandler(io.StringIO()), logging.getLogger()
    ours, theirs = logging.getLogger("agentlightning.some.module"), logging.getLogger("another")
    package = logging.getLogger("agentlightning")
    levels = root.level, package.level
    root.addHandler(terminal)
    root.setLevel(logging.WARNING)  # as they are in a process of its own, whatever other tests did
    package.setLevel(logging.NOTSET)
    try:
        for _ in range(2):  # a run that goes on appends
            with logged(tmp_path / "log.txt"):
                ours.info("a detail")
                ours.warning("an event")
                theirs.info("not ours")
        ours.info("outside")
    finally:
        root.removeHandler(terminal)
        after = package.level
        root.setLevel(levels[0])
        package.setLevel(levels[1])
    file = (tmp_path / "log.txt").read_text()
    assert (file.count("a detail"), file.count("an event"), file.count("not ours")) == (2, 2, 0)
    assert "outside" not in file
    assert terminal.stream.getvalue().splitlines() == ["an event"] * 2
    assert not terminal.filters
    assert after == logging.NOTSET
