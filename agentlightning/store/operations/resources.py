"""Resources: versions of the named things an algorithm tunes. The last one added or updated is the latest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy import bindparam, func, select, update

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.store.database.schema import resources
from agentlightning.store.database.transaction import Statement, Transaction
from agentlightning.store.operations.codec import decode, encode
from agentlightning.types import NamedResources, Resource, ResourcesUpdate

RESOURCES_FIELDS = tuple(ResourcesUpdate.model_fields)
RESOURCES_COLUMNS = [resources.c[name] for name in RESOURCES_FIELDS]

_select = Statement(select(*RESOURCES_COLUMNS).where(resources.c.resources_id == bindparam("id")))
_select_latest = Statement(select(*RESOURCES_COLUMNS).order_by(resources.c.revision.desc()).limit(1))
_last_revision = Statement(select(func.max(resources.c.revision)))
_insert = Statement(
    lambda insert: insert(resources).on_conflict_do_nothing(index_elements=["resources_id"]),
    [*RESOURCES_FIELDS, "revision"],
)
_update = Statement(
    update(resources).where(resources.c.resources_id == bindparam("id")),
    ["version", "update_time", "resources", "revision"],
)


def _types(base: type[Resource]) -> Iterator[type[Resource]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _types(subclass)


def resource_type(name: str) -> type[Resource]:
    """The class whose `resource_type` is `name`: ours, or one the user defined and imported."""
    for candidate in (Resource, *_types(Resource)):
        if candidate.model_fields["resource_type"].default == name:
            return candidate
    raise StoreError(f"The store holds a resource of type '{name}'; import the module that defines its class first.")


def encode_resources(named: Mapping[str, Resource]) -> str:
    for name, resource in named.items():
        owner = resource_type(resource.resource_type)
        if owner is not type(resource):
            raise ConfigError(
                f"Resource '{name}' is a {type(resource).__name__}, whose resource_type '{resource.resource_type}' "
                f"belongs to {owner.__name__}. Give the class a resource_type of its own."
            )
    return encode({name: resource.model_dump(mode="json") for name, resource in named.items()})


def decode_resources(values: Mapping[str, Mapping[str, Any]]) -> NamedResources:
    return {name: _decode_resource(name, value) for name, value in values.items()}


def _decode_resource(name: str, value: Mapping[str, Any]) -> Resource:
    kind = value.get("resource_type")
    if not isinstance(kind, str):
        raise StoreError(f"Resource '{name}' has no resource_type; give it one, for example 'llm'.")
    try:
        return resource_type(kind).model_validate(value)
    except ValidationError as error:
        raise StoreError(f"Resource '{name}' is no valid {kind}: {error}") from error


def to_update(row: Sequence[Any]) -> ResourcesUpdate:
    values = dict(zip(RESOURCES_FIELDS, row, strict=True))
    values["resources"] = decode_resources(
        decode(values["resources"], "resources.resources", values["resources_id"], type=dict[str, dict[str, Any]])
    )
    return ResourcesUpdate.model_construct(**values)


def read(tx: Transaction, resources_id: str) -> ResourcesUpdate | None:
    row = tx.row(_select, {"id": resources_id})
    return None if row is None else to_update(row)


def read_latest(tx: Transaction) -> ResourcesUpdate | None:
    row = tx.row(_select_latest, {})
    return None if row is None else to_update(row)


def _next_revision(tx: Transaction) -> int:
    return (tx.rows(_last_revision, {})[0][0] or 0) + 1


def _require(tx: Transaction, resources_id: str) -> ResourcesUpdate:
    stored = read(tx, resources_id)
    assert stored is not None
    return stored


def add(tx: Transaction, resources_id: str, text: str) -> ResourcesUpdate:
    """Store a first version; repeating it changes nothing."""
    values = {
        "resources_id": resources_id,
        "version": 1,
        "create_time": tx.now,
        "update_time": tx.now,
        "resources": text,
        "revision": _next_revision(tx),
    }
    if tx.run(_insert, values):
        tx.changes.counts["resources"] += 1
        return _require(tx, resources_id)
    row = tx.row(_select, {"id": resources_id})
    assert row is not None
    if row[RESOURCES_FIELDS.index("resources")] != text:
        raise ConflictError(
            f"Resources '{resources_id}' exist already, with another content. Use update_resources to replace them."
        )
    return to_update(row)


def replace(tx: Transaction, resources_id: str, text: str) -> ResourcesUpdate:
    """Insert, or replace and count the version up."""
    stored = tx.row(_select, {"id": resources_id})
    if stored is None:
        return add(tx, resources_id, text)
    version = stored[RESOURCES_FIELDS.index("version")] + 1
    values = {"version": version, "update_time": tx.now, "resources": text, "revision": _next_revision(tx)}
    tx.run(_update, {"id": resources_id, **values})
    return _require(tx, resources_id)
