"""Names of spans and attributes, as constants and enumerations."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel

from agentlightning.types import names

AGL_ANNOTATION = names.ANNOTATION
AGL_MESSAGE = names.MESSAGE
AGL_OBJECT = names.OBJECT
AGL_EXCEPTION = names.EXCEPTION
AGL_OPERATION = names.OPERATION
AGL_REWARD = names.REWARD
AGL_VIRTUAL = names.VIRTUAL


class LightningResourceAttributes(StrEnum):
    """On the resource of a span that comes in over OTLP."""

    ROLLOUT_ID = names.ROLLOUT_ID
    ATTEMPT_ID = names.ATTEMPT_ID
    SPAN_SEQUENCE_ID = names.SPAN_SEQUENCE_ID
    TRACER_NAME = "agentlightning.tracer.name"


class LightningSpanAttributes(StrEnum):
    """On spans; REWARD, LINK and TAG are prefixes."""

    REWARD = names.REWARD
    LINK = "agentlightning.link"
    TAG = "agentlightning.tag"
    MESSAGE_BODY = names.MESSAGE_BODY
    OBJECT_TYPE = names.OBJECT_TYPE
    OBJECT_LITERAL = "agentlightning.object.literal"
    OBJECT_JSON = names.OBJECT_JSON
    OPERATION_NAME = names.OPERATION_NAME
    OPERATION_INPUT = names.OPERATION_INPUT
    OPERATION_OUTPUT = names.OPERATION_OUTPUT


class RewardAttributes(StrEnum):
    """Below `agentlightning.reward.{i}`."""

    REWARD_NAME = "name"
    REWARD_VALUE = "value"


class LinkAttributes(StrEnum):
    """Below `agentlightning.link.{i}`."""

    KEY_MATCH = "key_match"
    VALUE_MATCH = "value_match"


class RewardPydanticModel(BaseModel):
    """One reward of a span."""

    name: str
    value: float


class LinkPydanticModel(BaseModel):
    """One link of a span to the spans whose attribute `key_match` is `value_match`."""

    key_match: str
    value_match: str
