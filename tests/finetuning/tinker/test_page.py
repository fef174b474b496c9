"""docs/tinker.md names every route, field and loss that the official client knows."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from google.protobuf.descriptor import FieldDescriptor
from pydantic import BaseModel

from agentlightning.finetuning.tinker import bodies, proto
from agentlightning.finetuning.tinker.data import LOSS_FORMS
from agentlightning.finetuning.tinker.routes import ROUTES

from .conftest import Running, tinker, types

PAGE = (Path(__file__).parents[3] / "docs" / "tinker.md").read_text()
LOSSES = PAGE.split("|---|---|---|---|")[1].split("\n## ")[0]
OURS = {
    "ClientConfigRequest": None,
    "CreateSessionRequest": bodies.CreateSession,
    "SessionHeartbeatRequest": bodies.SessionNamed,
    "SessionSearchRequest": bodies.SearchSessions,
    "CreateModelRequest": bodies.CreateModel,
    "LoraConfig": bodies.LoraChoice,
    "GetInfoRequest": bodies.ModelNamed,
    "ForwardBackwardRequest": None,
    "OptimStepRequest": None,
    "AdamParams": bodies.AdamParams,
    "SaveWeightsRequest": bodies.SaveWeights,
    "SaveWeightsForSamplerRequest": bodies.SaveForSampler,
    "SaveWeightsExternalRequest": bodies.SaveExternal,
    "LoadWeightsRequest": bodies.LoadWeights,
    "CopyWeightsRequest": bodies.CopyWeights,
    "CreateSamplingSessionRequest": bodies.CreateSamplingSession,
    "SampleRequest": bodies.SamplesRequest,
    "SamplingParams": bodies.SamplingChoice,
    "FutureRetrieveRequest": bodies.Retrieve,
}
"""By the client's names, our record of each body in JSON."""
ELSEWHERE = {
    "GetBillingUsageRequest",
    "GetCurrentCheckpointStorageUsageRequest",
    "CreateCustomLossRequest",
    "ForwardRequest",
    "FuturesRetrieveRequest",
    "JoinSamplingSessionRequest",
    "TelemetrySendRequest",
    "UnloadModelRequest",
}
"""Bodies of routes that are refused, that the client does not use, or that nobody reads."""


def clients_types() -> dict[str, set[str]]:
    """The fields of the client's requests, and of what they are made of."""
    found: dict[str, set[str]] = {}
    for module in pkgutil.iter_modules(types.__path__):
        loaded = importlib.import_module(f"tinker.types.{module.name}")
        for name, kind in vars(loaded).items():
            fields: Any = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", None)
            if inspect.isclass(kind) and fields and (name.endswith("Request") or name in OURS):
                found[name] = {*fields} - {"type"}
    return found


def documented() -> dict[str, tuple[set[str], set[str]]]:
    """What the table says is honoured and refused of each request."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", PAGE.split("## Fields")[1].split("\n## ")[0], re.M)
    honoured = [(name, re.sub(r"\([^)]*\)", "", yes), no) for name, yes, no in rows]
    return {name: ({*re.findall(r"`(\w+)`", yes)}, {*re.findall(r"`(\w+)`", no)}) for name, yes, no in honoured}


def test_the_script_of_the_page_runs(
    running: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", running.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    block = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert block is not None
    given: dict[str, Any] = {}
    exec(block[1], given)
    given["client"].close("success").result()
    *losses, _ = capsys.readouterr().out.splitlines()
    assert float(losses[4]) < float(losses[0])


def test_every_request_and_field_of_the_client_is_in_the_table() -> None:
    said, known = documented(), clients_types()
    assert {*known} - ELSEWHERE == {*said}
    for name, fields in known.items():
        if name in said:
            honoured, refused = said[name]
            assert honoured | refused == fields, name
            assert not honoured & refused, name


@pytest.mark.parametrize("name", [name for name, ours in OURS.items() if ours is not None])
def test_what_is_honoured_is_read_and_what_is_refused_has_a_reason(name: str) -> None:
    honoured, refused = documented()[name]
    ours: Any = OURS[name]
    assert honoured <= {field.name for field in msgspec.structs.fields(ours)}
    assert refused <= {*bodies.NOT_HERE}


def test_every_loss_of_the_client_is_there_or_said_not_to_be() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| [^`|]*? \| (.*) \| .* \|$", LOSSES, re.M))
    assert {*rows} == {*LOSS_FORMS}
    for name, inputs in rows.items():
        form = LOSS_FORMS[name]
        assert {*re.findall(r"`(\w+)`", inputs)} - {"target_tokens"} == form.inputs | form.optional
    known = {*get_args(types.LossFnType)} - {"custom"}
    assert known - {*rows} == {"stable_reinforce"}


def test_the_table_of_routes_is_that_of_the_server() -> None:
    rows = re.findall(r"^\| `([A-Z]+) (/[^`]+)` \| (.*) \|$", PAGE, re.M)
    assert rows == [(r.method, r.path.replace(":path", ""), r.says) for r in ROUTES]


def test_every_route_of_the_client_is_served_or_said_to_be_refused() -> None:
    files = [file for file in Path(tinker.__file__).parent.rglob("*.py") if not file.stem.endswith("_test")]
    sources = [file.read_text() for file in files]
    varies = re.compile(r"\{[^}]*\}")
    known = {varies.sub("{}", path) for text in sources for path in re.findall(r'f?"/api/v1(/[^"\s`]+)"', text)}
    assert "/forward_backward" in known
    served = {varies.sub("{}", route.path) for route in ROUTES}
    others = {*re.findall(r"`(/[^`]+)`", PAGE.split("Other routes of the service")[1].split("\n\n")[0])}
    of_admins = {
        path for path in known if re.match(r"/(admin|auth|billing|audit|organi|projects|usage|checkpoint_)", path)
    }
    assert known - served - others - of_admins == set()


def test_our_messages_are_the_clients() -> None:
    """Number, kind and name of each field that we describe; what we do not is refused where it would matter."""
    from tinker.proto import tinker_public_pb2 as theirs

    for message in (proto.ForwardBackwardRequest, proto.ForwardBackwardOutput, proto.SampleResponse):
        compare(message.DESCRIPTOR, getattr(theirs, message.DESCRIPTOR.name).DESCRIPTOR)


def compare(ours: Any, theirs: Any) -> None:
    enums = {FieldDescriptor.TYPE_ENUM: FieldDescriptor.TYPE_INT32}
    for field in ours.fields:
        other = theirs.fields_by_number[field.number]
        assert field.name == other.name, (ours.name, field.name)
        kind = enums.get(other.type, other.type)
        integers = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT32)
        assert field.type == kind or {field.type, kind} <= {*integers, FieldDescriptor.TYPE_UINT64}, field.name
        assert field.is_repeated == other.is_repeated, field.name
        if field.message_type is not None:
            compare(field.message_type, other.message_type)


def test_the_clients_bodies_are_read() -> None:
    """Each of the client's requests, with every field given, through our reader: what it cannot use it names."""
    lora = {"rank": 4, "seed": 1, "train_unembed": False, "train_mlp": True, "train_attn": True}
    body = {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "calc",
        "user_metadata": {"a": "b"},
        "lora_config": lora,
    }
    given: BaseModel = importlib.import_module("tinker.types.create_model_request").CreateModelRequest(**body)
    assert bodies.read(given.model_dump_json().encode(), bodies.CreateModel).lora_config is not None
