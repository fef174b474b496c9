"""Runs inside the sandbox: becomes the given command, which may have that many threads and processes and no more.

`python -I -S few.py 24 node judge.mjs`: for programs that need some threads of their own.
"""

from __future__ import annotations

import os
import resource
import sys

most = int(sys.argv[1])
for limit, value in ((resource.RLIMIT_NPROC, most), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (value, value))
os.execvp(sys.argv[2], sys.argv[2:])
