"""How many files and connections this process may have open."""

from __future__ import annotations

import contextlib

try:
    import resource
except ImportError:  # not on this system
    resource = None

_MOST = 2**14


def raise_file_limit() -> None:
    """Let the process open as many files as the system lets it, up to what servers use."""
    if resource is not None:
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MOST if most == resource.RLIM_INFINITY else min(most, _MOST)
        if now != resource.RLIM_INFINITY and now < wanted:
            with contextlib.suppress(OSError, ValueError):  # where a system allows less than it says
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def file_descriptors() -> int:
    """How many files the process may have open."""
    if resource is None:
        return 1024
    found = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if found == resource.RLIM_INFINITY else found
