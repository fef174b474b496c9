"""What a value of a task's docker-compose.yaml may be, key by key. Any other raises ConfigError with the key's place.

The table `SERVICE_KEYS` is all that a service may have: what is not in it is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from agentlightning.errors import ConfigError

NAME = re.compile(r"[a-zA-Z0-9][\w.-]{0,62}", re.ASCII)
"""Names of services, networks, volumes and hosts."""
_USER = re.compile(r"\w[\w.-]*(:\w[\w.-]*)?", re.ASCII)
_PLACE = re.compile(r"/[^:,\n]*")
_SIZE = re.compile(r"\d+(\.\d+)?\s*([kmg]i?b?|b)?", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"\d+(\.\d+)?", re.ASCII)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(h|ms|us|ns|m|s)", re.ASCII)
_SIGNAL = re.compile(r"[A-Z][A-Z0-9+-]{1,12}|\d{1,2}", re.ASCII)
_CAPABILITY = re.compile(r"[A-Z_]{2,40}", re.ASCII)
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "us": 1e-6, "ns": 1e-9}
_LONGEST = 86_400.0
_RESTARTS = {
    "no": "no",
    "False": "no",
    "on-failure": "on-failure",
    "always": "on-failure",
    "unless-stopped": "on-failure",
}
"""How a service that ended is started again. Nothing is started again after this machine was."""


def mapping(value: Any, where: str, keys: Collection[str] | None = None) -> Mapping[str, Any]:
    """A mapping, empty where the key is missing. Raises ConfigError for a key that is not among `keys`."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {str(value)[:60]!r} is no mapping.")
    for key in value:
        if keys is not None and key not in keys and not key.startswith("x-"):
            raise ConfigError(f"{where}: {key} is not taken from a task. Here may be: {', '.join(sorted(keys))}.")
    return value


def named(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The pairs of a mapping whose keys are names of the task's."""
    for name, one in mapping(value, where).items():
        if not NAME.fullmatch(name):
            raise ConfigError(f"{where}: {name!r} is no name; letters, digits, and . _ - behind the first are.")
        yield name, one


def listed(value: Any, where: str) -> list[Any]:
    """A list, empty where the key is missing."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {str(value)[:60]!r} is no list.")
    return value


def scalar(value: Any, where: str) -> str:
    """A text or a number, as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{where}: {str(value)[:60]!r} is no text.")
    return str(value)


def matching(pattern: re.Pattern[str], value: Any, where: str) -> str:
    """A text of a form."""
    text = scalar(value, where)
    if not pattern.fullmatch(text):
        raise ConfigError(f"{where}: {text[:60]!r} is not what may stand here.")
    return text


def place(value: Any, where: str) -> str:
    """An absolute path in a container, other than its root."""
    text = matching(_PLACE, value, where)
    if not text.strip("/.") or ".." in text.split("/"):
        raise ConfigError(f"{where}: {text!r} is no place in a container.")
    return text


def flag(value: Any, where: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {str(value)[:60]!r} is neither true nor false.")
    return value


def seconds(value: Any, where: str) -> float:
    """A time such as 1m30s, in seconds."""
    text = scalar(value, where).strip()
    parts = _TIME.findall(text)
    if "".join(number + unit for number, unit in parts) != text or not parts:
        raise ConfigError(f"{where}: {text[:60]!r} is no time such as 10s or 1m30s.")
    return min(sum(float(number) * _SECONDS[unit] for number, unit in parts), _LONGEST)


def _words(value: Any, where: str) -> list[str]:
    """A command as words."""
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}.") from None
    return [scalar(word, where) for word in listed(value, where)]


def _places(value: Any, where: str) -> list[str]:
    return [place(one, where) for one in ([value] if isinstance(value, str) else listed(value, where))]


def _limits(value: Any, where: str) -> dict[str, Any]:
    """Limits of processes by name, each a number or a soft and a hard one."""
    found: dict[str, Any] = {}
    for name, one in named(value, where):
        both = one if isinstance(one, Mapping) else {"soft": one, "hard": one}
        given = mapping(both, f"{where}.{name}", ("soft", "hard"))
        numbers = {key: given.get(key) for key in ("soft", "hard")}
        if any(type(number) is not int or number < 0 for number in numbers.values()):
            raise ConfigError(f"{where}.{name}: it is a number, or has soft and hard.")
        found[name] = numbers
    return found


def _deployed(value: Any, where: str) -> dict[str, str]:
    """The limits of `deploy`, as the keys of a service that say the same."""
    resources = mapping(mapping(value, where, ("resources",)).get("resources"), f"{where}.resources", ("limits",))
    place = f"{where}.resources.limits"
    limits = mapping(resources.get("limits"), place, ("cpus", "memory"))
    found = {"cpus": _cpus(limits["cpus"], f"{place}.cpus")} if "cpus" in limits else {}
    return found | ({"mem_limit": matching(_SIZE, limits["memory"], f"{place}.memory")} if "memory" in limits else {})


def _cpus(value: Any, where: str) -> Any:
    return float(matching(_NUMBER, value, where))


def _restart(value: Any, where: str) -> str:
    text = str(value)
    if text not in _RESTARTS:
        raise ConfigError(f"{where}: {text[:60]!r} is none of no, on-failure, always and unless-stopped.")
    return _RESTARTS[text]


def _form(pattern: re.Pattern[str]) -> Callable[[Any, str], Any]:
    return lambda value, where: matching(pattern, value, where)


def _capabilities(value: Any, where: str) -> list[str]:
    return [matching(_CAPABILITY, one, where) for one in listed(value, where)]


SETTINGS: Mapping[str, Callable[[Any, str], Any]] = {
    "cap_drop": _capabilities,
    "command": _words,
    "cpus": _cpus,
    "entrypoint": _words,
    "hostname": _form(NAME),
    "init": flag,
    "mem_limit": _form(_SIZE),
    "read_only": flag,
    "restart": _restart,
    "shm_size": _form(_SIZE),
    "stdin_open": flag,
    "stop_signal": _form(_SIGNAL),
    "tmpfs": _places,
    "tty": flag,
    "ulimits": _limits,
    "user": _form(_USER),
    "working_dir": _form(_PLACE),
}
"""Keys of a service that its container is given."""
_READ = (
    "build",
    "container_name",
    "depends_on",
    "deploy",
    "environment",
    "healthcheck",
    "image",
    "networks",
    "volumes",
)
_WITHOUT_EFFECT = ("expose", "labels", "stop_grace_period")
SERVICE_KEYS = frozenset({*SETTINGS, *_READ, *_WITHOUT_EFFECT})
"""All that a service may have."""


def settings_of(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a service's container is given, of the keys in `SETTINGS` and of `deploy`."""
    deployed = _deployed(given.get("deploy"), f"{where}.deploy")
    own = {key: read(given[key], f"{where}.{key}") for key, read in SETTINGS.items() if given.get(key) is not None}
    return {**deployed, **own}
