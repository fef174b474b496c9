"""Parts of the client's requests and answers: paths, and JSON that is encoded or decoded in one go."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from agentlightning.store.base import Unset
from agentlightning.store.operations.codec import encode_task, new_id
from agentlightning.store.operations.resources import decode_resources, encode_resources
from agentlightning.types import NamedResources, PaginatedResult, ResourcesUpdate, RolloutConfig, RolloutMode


def path(text: str) -> str:
    return quote(text, safe="")


def task(input: Any) -> msgspec.Raw:
    return msgspec.Raw(encode_task(input, "A task").encode())


def new_rollout(
    input: Any,
    mode: RolloutMode | None,
    resources_id: str | None,
    config: RolloutConfig | None,
    metadata: dict[str, Any] | None,
    rollout_id: str | None,
    run_id: str | None,
) -> dict[str, Any]:
    return {
        "input": task(input),
        "mode": mode,
        "resources_id": resources_id,
        "config": config,
        "metadata": metadata,
        "rollout_id": rollout_id or new_id("ro"),
        "run_id": run_id,
    }


def given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, Unset)}


def named(resources: NamedResources) -> msgspec.Raw:
    return msgspec.Raw(encode_resources(resources).encode())


def read_resources(body: bytes) -> PaginatedResult[ResourcesUpdate]:
    page = msgspec.json.decode(body)
    page["items"] = [make_update(item) for item in page["items"]]
    return PaginatedResult[ResourcesUpdate].model_construct(**page)


def make_update(values: dict[str, Any]) -> ResourcesUpdate:
    return ResourcesUpdate.model_construct(**{**values, "resources": decode_resources(values["resources"])})


def to_update(body: bytes) -> ResourcesUpdate:
    return make_update(msgspec.json.decode(body))
