"""The messages of the API that travel as protobuf, described in code: only what the server reads and writes.

A field that is not here is kept by protobuf as unknown; `unknown_fields` lets whoever reads refuse it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

_PACKAGE = "agentlightning.tinker"
_MESSAGES = """
ForwardBackwardRequest: 1 model_id string, 2 seq_id int64, 3 data Datum*, 4 loss_fn string,
    5 loss_fn_config {double}, 6 forward_only bool, 7 loss_fn_config_v2 {LossConfigValue}
LossConfigValue: 1 number double?, 2 text string?
Datum: 1 model_input Chunk*, 2 loss_fn_inputs {Tensor}, 3 model_input_spans Span*, 4 loss_fn_input_spans Span*
Span:
Chunk: 1 encoded_text Text, 2 image Media, 3 dmel Media
Text: 1 tokens bytes
Media:
Tensor: 1 dense bytes?, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*
SparseCsr: 1 values bytes, 2 crow_indices bytes, 3 col_indices bytes
ForwardBackwardOutput: 1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics {double}
ArrayRecord: 1 type_tag string, 2 fields {BatchedTensor}, 3 num_datums int64
BatchedTensor: 1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*
SampleResponse: 1 sequences SampledSequence*, 2 prompt_logprobs bytes?, 3 topk_prompt_logprobs TopkLogprobs,
    4 prompt_cache_hit_tokens int64
SampledSequence: 1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes?, 4 topk_sampled_logprobs TopkLogprobs
TopkLogprobs: 1 token_ids bytes, 2 logprobs bytes, 3 k int64, 4 length int64
"""
"""A line for each message: number, name and type of its fields. `*` is repeated, `?` knows whether it was set, and
`{type}` is a map from strings."""

_F = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "string": _F.TYPE_STRING,
    "bytes": _F.TYPE_BYTES,
    "double": _F.TYPE_DOUBLE,
    "bool": _F.TYPE_BOOL,
    "int32": _F.TYPE_INT32,
    "int64": _F.TYPE_INT64,
}


def _typed(field: Any, kind: str) -> None:
    if kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = _F.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="agentlightning/tinker.proto", package=_PACKAGE, syntax="proto3")
    for line in _MESSAGES.replace(",\n", ",").strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for described in filter(None, map(str.strip, fields.split(","))):
            number, field_name, kind = described.split()
            repeated = kind.endswith("*") or kind.startswith("{")
            field = message.field.add(name=field_name, number=int(number))
            field.label = _F.LABEL_REPEATED if repeated else _F.LABEL_OPTIONAL
            if kind.startswith("{"):
                entry_name = "".join(word.capitalize() for word in field_name.split("_")) + "Entry"
                entry = message.nested_type.add(name=entry_name)
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=_F.TYPE_STRING, label=_F.LABEL_OPTIONAL)
                _typed(entry.field.add(name="value", number=2, label=_F.LABEL_OPTIONAL), kind.strip("{}"))
                _typed(field, f"{name}.{entry_name}")
                continue
            _typed(field, kind.rstrip("*?"))
            if kind.endswith("?"):
                field.proto3_optional = True
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field_name}")
    return file


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_described())  # pyright: ignore[reportAttributeAccessIssue]
    names = [line.partition(":")[0] for line in _MESSAGES.splitlines() if line[:1].isupper()]
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{n}")) for n in names}


_made = _classes()
ForwardBackwardRequest = _made["ForwardBackwardRequest"]
ForwardBackwardOutput = _made["ForwardBackwardOutput"]
SampleResponse = _made["SampleResponse"]


def unknown_fields(message: Message) -> Iterator[str]:
    """What a message holds that is not described here, by message and number."""
    for field in UnknownFieldSet(message):
        yield f"{message.DESCRIPTOR.name}.{field.field_number}"
