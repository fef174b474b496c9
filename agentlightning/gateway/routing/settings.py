"""Structs that users make: a field that does not exist is refused with the one that was probably meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from agentlightning.arguments import check_kinds, refuse_missing, refuse_unknown


class _NamedFields(type(msgspec.Struct)):
    if not TYPE_CHECKING:  # type checkers and editors look at the fields

        def __call__(cls, *positional: Any, **given: Any) -> Any:
            check_kinds(cls.__name__, given, get_type_hints(cls))
            try:
                return super().__call__(*positional, **given)
            except TypeError:
                from inspect import signature

                parameters = list(signature(cls).parameters.values())
                refuse_unknown(cls.__name__, positional, given, [p.name for p in parameters], None)
                refuse_missing(cls.__name__, given, parameters, {})
                raise


class RoutingSettings(msgspec.Struct, metaclass=_NamedFields, frozen=True, kw_only=True):
    """Fields are given by name."""
