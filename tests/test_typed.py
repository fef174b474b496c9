"""A fork of the warm interpreter ends as a new interpreter does: its status, its words, and what runs at its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.typed import typed

ENDINGS = {
    "nothing": "print('done')",
    "status": "import sys; print('done'); sys.exit(3)",
    "none": "import sys; sys.exit(None)",
    "words": "import sys; sys.exit('no')",
    "large status": "import sys; sys.exit(257)",
    "error": "print('done'); 1 / 0",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "at exit of an error": "import atexit; atexit.register(print, 'last'); 1 / 0",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('last'))).start()",
    "closed": "import sys; print('done'); sys.stdout.close()",
    "interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(5)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_as_an_interpreter_does(tmp_path: Path, ending: str) -> None:
    code = ENDINGS[ending]
    forked = typed(tmp_path, "-c", code)
    new = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]
    assert "Traceback" not in forked.stderr or "Traceback" in new.stderr


def test_it_imports_from_where_its_environment_says(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.py").write_text("print('found')")
    done = typed(tmp_path, "-c", "import mine", environment={"PYTHONPATH": str(tmp_path / "there")})
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr
    assert typed(tmp_path, "-c", "import mine").returncode == 1


def test_who_stops_waiting_leaves_no_answer_for_the_next(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(InterruptedError):
            typed(tmp_path, "-c", "import time; time.sleep(60)")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert typed(tmp_path, "-c", "raise SystemExit(3)").returncode == 3
