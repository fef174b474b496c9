"""Which dialect the path of a request speaks. Paths are those that a dialect names, with or without parts that vary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from agentlightning.errors import ConfigError
from agentlightning.gateway.dialects.base import Body, Dialect

_VARIES = re.compile(r"\\{(\w+)\\}")


class DialectRoute(NamedTuple):
    """A request's URL, as far as a dialect answers for it."""

    dialect: Dialect
    path: str
    """Without /v1 and what is before it."""
    query: str
    counting: bool
    """Whether the tokens of the request are counted instead of answering it."""

    def read(self, body: Body) -> Body:
        """The request with what its URL says."""
        return self.dialect.located(body, self.path, self.query)


class Paths:
    """The paths of dialects, and those of others that are left. Raises `ConfigError` if two dialects claim one."""

    def __init__(self, dialects: Sequence[Dialect], others: Sequence[Dialect] = ()) -> None:
        self._exact: dict[str, tuple[Dialect, bool]] = {}
        self._varying: list[tuple[re.Pattern[str], Dialect, bool]] = []
        for dialect in (*dialects, *others):
            for path in (*dialect.paths, *dialect.counting_paths):
                if dialect in dialects or path not in self._exact:
                    self._add(path, dialect, counting=path in dialect.counting_paths)

    @property
    def known(self) -> list[str]:
        """All of them, as the dialects write them."""
        return list(self._exact)

    def find(self, path: str, query: str = "") -> DialectRoute | None:
        """The dialect of a path; None if there is none."""
        found = self._exact.get(path)
        if found is None:
            matches = ((dialect, counts) for shape, dialect, counts in self._varying if shape.fullmatch(path))
            found = next(matches, None)
        return None if found is None else DialectRoute(found[0], path, query, found[1])

    def _add(self, path: str, dialect: Dialect, *, counting: bool) -> None:
        if path in self._exact:
            other = self._exact[path][0].name
            raise ConfigError(f"The dialects '{other}' and '{dialect.name}' both have the path {path}.")
        self._exact[path] = dialect, counting
        if "{" in path:
            self._varying.append((re.compile(_VARIES.sub(_part, re.escape(path))), dialect, counting))


def _part(varies: re.Match[str]) -> str:
    """A model's name may have slashes in it."""
    return ".+" if varies[1] == "model" else "[^/]+"
