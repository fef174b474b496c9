"""One line of the table of older names, and what its two columns say; `table` has the lines."""

from __future__ import annotations

from typing import Any, NamedTuple


class Old(NamedTuple):
    """One line of the table."""

    name: str
    to: str | None
    note: str = ""
    accepts: tuple[Any, ...] | None = None
    """Of an argument that leads nowhere: the values that ask for what happens anyway; others are refused. None: all do,
    because it is about how something was done, and not about what comes of it."""

    @property
    def state(self) -> str:
        """`same`: it is there and does what it did. `other`: something else is written or happens. `refused`."""
        if self.to is None:
            return "refused"
        if self.accepts is not None:
            return f"refused, but for {' and '.join(map(repr, self.accepts))}"
        return "other" if self.newer or (self.is_argument and self.note and self.to == "") else "same"

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
