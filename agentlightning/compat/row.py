"""One line of the table of older names, and what its two columns say; `table` has the lines."""

from __future__ import annotations

from typing import NamedTuple


class Old(NamedTuple):
    """One line of the table."""

    name: str
    to: str | None
    note: str = ""

    @property
    def is_module(self) -> bool:
        return ":" not in self.name

    @property
    def is_argument(self) -> bool:
        return self.name.endswith("=)")

    @property
    def is_member(self) -> bool:
        return not self.is_module and not self.is_argument and "." in self.name.partition(":")[2]

    @property
    def newer(self) -> str | None:
        """What to write today; None where there is nothing newer."""
        if not self.to or self.to.startswith(COMPAT):
            return None
        return self.to.replace(":", ".")


COMPAT = "agentlightning.compat."
