"""The environment variables that a user sets, and those that are spelled nearly like one of them."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping

OF_USERS = (
    *("AGL_API_KEY", "AGL_CRITIC_KEY", "AGL_EMBEDDINGS_KEY", "AGL_JUDGE_KEY", "AGL_STORE_KEY", "AGL_TEACHER_KEY"),
    *("AGL_UPSTREAM_KEY", "AGL_ALLOW_HOSTS", "AGL_CACHE", "AGL_CURRENT_ROLE", "AGL_DEBUG", "AGL_UMASK"),
    "AGL_LARGEST_REWARD",
    *("AGL_MANAGED_STORE", "AGL_SERVER_HOST", "AGL_SERVER_PORT", "AGL_STORE_DSN"),
)
"""All of them. A program is given others, such as AGL_TASK, and its user may have more."""
_OTHERS = ("AGL_EMITTER_DEBUG", "AGL_TASK", "AGL_TASK_FILE", "AGL_REWARD_FILE", "AGL_REWARD_URL")
_OPTIONS = ("model", "agent", "tasks", "val_tasks", "data", "steps", "seed", "config", "run_dir", "resume", "endpoint")
_SETTINGS = ("device", "dtype", "learning_rate", "group_size", "backend")
_AS_OPTIONS = {
    **{f"AGL_{name}".upper(): f"--{name.replace('_', '-')}" for name in _OPTIONS},
    **{f"AGL_{name}".upper(): f"--set {name}=…" for name in _SETTINGS},
}
"""What people expect to set by a variable, and the option that sets it."""
_ALIKE = 0.85


def misspelt(variables: Iterable[str]) -> Iterator[str]:
    """A sentence for each variable that is one of ours but for a letter or a word, and so has no effect."""
    for name in variables:
        ours = re.sub("^(AGENT_?LIGHTNING|AGENTL)_", "AGL_", name)
        if not ours.startswith("AGL_") or name in (*OF_USERS, *_OTHERS):
            continue
        if ours in _AS_OPTIONS:
            yield f"{name} is set, and nothing reads it: give {_AS_OPTIONS[ours]}, or the same in the script."
            continue
        for meant in difflib.get_close_matches(ours, OF_USERS, n=1, cutoff=_ALIKE):
            yield f"{name} is set, and nothing reads it. Did you mean {meant}?"


_OF_FILES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Where HTTP clients find the certificates that they trust, also those that need none."""


def that_break_clients(variables: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable with which an agent's clients fail at calls to this very machine."""
    for name in _OF_FILES:
        if (place := variables.get(name)) and not os.path.exists(place):
            yield f"{name} names {place}, which is not there: HTTP clients fail with it. Unset it, or mend the path."


_WARNED = set[str]()


def new_warnings() -> list[str]:
    """What is wrong with this process's variables: each sentence once, whether a command says it or a training."""
    new = [words for words in (*misspelt(os.environ), *that_break_clients(os.environ)) if words not in _WARNED]
    _WARNED.update(new)
    return new
