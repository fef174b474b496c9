"""The resources as an agent is given them: a dictionary whose errors say what there is.

Class-based agents of older scripts read `resources["main_llm"]`, newer ones `resources["llm"]`: both names mean the one
endpoint that is there.
"""

from __future__ import annotations

from typing import Any

from agentlightning.errors import UnknownResourceError
from agentlightning.types import Resource

_SAME = {"llm": "main_llm", "main_llm": "llm"}


class GivenResources(dict[str, Resource]):
    """See the module's docstring."""

    def __missing__(self, name: str) -> Resource:
        other = _SAME.get(name, "")
        if dict.__contains__(self, other):
            return self[other]
        there = ", ".join(repr(known) for known in self) or "none"
        raise UnknownResourceError(
            f"There is no resource {name!r}; there are: {there}. Use one of these names, or give the resource with "
            f"Trainer(initial_resources={{{name!r}: …}})."
        )

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name) or dict.__contains__(self, _SAME.get(str(name), ""))

    def get(self, name: str, default: Any = None) -> Any:
        """The resource of this name, or `default`."""
        try:
            return self[name]
        except UnknownResourceError:
            return default
