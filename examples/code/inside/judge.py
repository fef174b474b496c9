"""Runs inside the sandbox: calls the function f of the code on stdin with inputs, and prints what it gives.

It is given no expected value, so nothing that the code does here can make a wrong answer right. Processes are forbidden
before the code runs. Uses nothing but the standard library: `python -I -S judge.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys


def main() -> None:
    given = json.load(sys.stdin)
    for limit, most in ((resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, 16), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (most, most))
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # what the code prints is no answer
        exec(compile(given["code"], "f.py", "exec"), names)
        function = names["f"]
        found = [function(value) for value in given["inputs"]]  # type: ignore[operator]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
