"""A run's log file: it has everything, and the terminal no more than before."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from agentlightning.console import TerminalLog
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


def test_of_lines_that_come_again_and_again_a_few_are_on_the_terminal() -> None:
    now, stream = [0.0], io.StringIO()
    shown = TerminalLog(kept=True, clock=lambda: now[0])
    shown.setStream(stream)
    log = logging.Logger("agentlightning.part")
    log.addHandler(shown)
    for number in range(50):
        log.warning("Attempt %d waits: the disk is full", number)
        log.warning("%s", f"a sentence of its own, {number % 25}")  # twice each
    now[0] = TerminalLog.SECONDS + 1
    log.warning("Attempt %d waits: the disk is full", 50)
    lines = [line.removeprefix("WARNING agentlightning.part: ") for line in stream.getvalue().splitlines()]
    assert [line for line in lines if "sentence" not in line] == [
        *(f"Attempt {number} waits: the disk is full" for number in range(3)),
        "More lines like the last 3 are left out here for 60 s.",
        "47 lines like the next one were left out here.",
        "Attempt 50 waits: the disk is full",
    ]
    assert sum("sentence" in line for line in lines) == 50
    for number in range(2 * TerminalLog.PLACES):
        log.warning(f"words that are filled in before, {number}")
    assert len(shown._places) == TerminalLog.PLACES


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_a_service_logs_is_written_whole_and_a_terminal_is_spared() -> None:
    for stream, lines in ((io.StringIO(), 50), (Screen(), TerminalLog.SHOWN + 1)):
        shown = TerminalLog()
        shown.setStream(stream)
        log = logging.Logger("agentlightning.part")
        log.addHandler(shown)
        for number in range(50):
            log.warning("Attempt %d waits", number)
        assert stream.getvalue().count("\n") == lines


def test_lines_of_a_framework_that_differ_in_numbers_alone_are_the_same_on_a_terminal() -> None:
    shown, stream = TerminalLog(), Screen()
    shown.setStream(stream)
    log = logging.Logger("crewai.llms")
    log.addHandler(shown)
    for number in range(50):
        log.error(f"The call failed - Usage(tokens={number}, total={2 * number})")
    log.error("Something else")
    assert stream.getvalue().count("\n") == TerminalLog.SHOWN + 2


def test_a_standard_error_that_was_closed_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # Python would print that it cannot print
    shown, stream = TerminalLog(), io.StringIO()
    shown.setStream(stream)
    stream.close()
    log = logging.Logger("agentlightning.part")
    log.addHandler(shown)
    log.warning("an event")
