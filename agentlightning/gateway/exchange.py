"""What a dialect hands to the gateway and gets back: one request, its choices, and the pieces of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentlightning.engine.base import PromptLogprobs
from agentlightning.errors import GatewayError
from agentlightning.rendering.messages import Message, Tool
from agentlightning.types.call import Float32Array, Int32Array, LeftOut


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call with the id that the client will repeat; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str


class ToolChoice(msgspec.Struct, frozen=True):
    """`mode` is auto, none or required; `name` is the tool that is required, if it must be a certain one."""

    mode: str = "auto"
    name: str | None = None
    among: tuple[str, ...] = ()
    """The tools that may be called, where these are not all."""


class AnswerSchema(msgspec.Struct, frozen=True):
    """A JSON schema that an answer must follow, and the field of the request that it stands in."""

    value: Mapping[str, Any]
    param: str


class TemplateArgument(msgspec.Struct, frozen=True):
    """What a request wants to give to the model's chat template."""

    name: str
    value: Any
    param: str
    """Where in the request it stands."""
    hint: bool = False
    """Whether it is the provider's own word for how much is thought: a chat format that has no such argument may have
    a switch for it, and may be without."""


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, whatever its dialect."""

    dialect: str
    model: str
    messages: list[Message]
    prompt: str | list[int] | None = None
    """A raw prompt, as text or tokens, in place of messages."""
    prompts: list[str | list[int]] = []
    """All raw prompts, if there are several; each is a call of its own."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = ToolChoice()
    strict: Mapping[str, str] = {}
    """Tools whose arguments must follow their schema whenever they are called, and the field where each has it."""
    parallel_tool_calls: bool = True
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether log-probs name tokens by their ids ("token_id:7") and not by their texts."""
    echo: bool = False
    """Whether the text and the log-probs of an answer to a raw prompt begin with those of the prompt."""
    prompt_logprobs: int | None = None
    """How many alternatives to tell of each of the prompt's tokens, beside its log-prob; None: nothing."""
    skips_special: bool = False
    """Whether the text of an answer to a raw prompt is without special tokens."""
    schema: AnswerSchema | None = None
    """Of an answer, as far as it is not a tool call."""
    asked: Mapping[str, Any] = {}
    """Sampling settings by neutral name: temperature, top_p, top_k, max_tokens, stop, seed. Only those given."""
    template: tuple[TemplateArgument, ...] = ()
    """For the model's chat template; of two of one name the later one wins."""
    arguments: Mapping[str, Any] = {}
    """Those of them that the chat format has (`sampling.served`)."""
    shows_stop: bool = False
    """Whether a text that was ended by a stop string ends with it."""
    measured: bool = False
    """Whether its texts are known to fit the model's context."""
    size: int | None = None
    """Characters of its texts, where they were counted with the request."""
    digests: tuple[bytes, bytes] | None = None
    """The keys of its messages (`history.tree.MessageKeys`), where they were made with the request."""
    begun: str = ""
    """The text with which the client began the answer itself, which the model goes on from."""
    remember: list[Message] | None = None
    """For stateful dialects: the messages that the next request may refer to by the response's id."""
    cleared: bool = False
    """Whether parts of its history were cleared, because it asked for that."""
    left_out: tuple[LeftOut, ...] = ()
    """What of it has no effect."""
    private: Any = None
    """What the dialect needs again when it answers."""

    @property
    def scores_prompt(self) -> int | None:
        """How many alternatives the engine has to tell of each of the prompt's tokens; None: nothing."""
        wanted = [] if self.prompt_logprobs is None else [self.prompt_logprobs]
        return max([*wanted, *([self.top_logprobs] if self.echo and self.logprobs else [])], default=None)


class PromptEcho(msgspec.Struct, frozen=True):
    """A prompt as it is repeated in an answer."""

    text: str
    ids: Int32Array
    logprobs: PromptLogprobs | None
    """None of a prompt of one token, or where they were not asked for."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One response to a request."""

    index: int
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """stop, length or tool_calls."""
    stop_string: str | None
    ids: Int32Array
    logprobs: Float32Array
    """Under the plain softmax."""
    top_ids: Int32Array | None = None
    top_logprobs: Float32Array | None = None
    begun: str = ""
    """The text before it with which the client began the answer."""
    prompt: PromptEcho | None = None
    """Where the request asks for something of its prompt."""
    reasoning_tokens: int = 0
    """How many of them are reasoning, with its marks; 0 where the format does not mark it by tokens."""

    def message(self) -> Message:
        """The choice as a neutral message, the way clients send it back."""
        message: Message = {"role": "assistant", "content": self.begun + self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request."""

    response_id: str
    created: int
    model: str
    prompts: tuple[Int32Array, ...]
    """The tokens of each prompt; the choices are those of the first one, then those of the next."""
    cached_tokens: int
    choices: tuple[Choice, ...]

    @property
    def prompt_ids(self) -> Int32Array:
        """The tokens of the prompt, or of the first one."""
        return self.prompts[0]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def response_tokens(self) -> int:
        return sum(len(choice.ids) for choice in self.choices)


class Begin(msgspec.Struct, frozen=True):
    """The first thing a stream shows: the prompt is accepted."""

    prompt_tokens: int


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a streamed choice gained: text, and the tokens that were sampled since the last delta."""

    index: int
    content: str = ""
    reasoning: str = ""
    ids: Int32Array | None = None
    logprobs: Float32Array | None = None
    top_ids: Int32Array | None = None
    top_logprobs: Float32Array | None = None


_LONGEST_MESSAGE = 2000


class Refusal(GatewayError):
    """A request the gateway does not serve. Each dialect says it in its provider's own error shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        if len(message) > _LONGEST_MESSAGE:  # it repeats something that the request says
            message = f"{message[:_LONGEST_MESSAGE]} … ({len(message) - _LONGEST_MESSAGE} more characters)"
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.wire_code = code
        """The provider's word for it, where it has one; `code` is ours for the class."""
        self.param = param


UNUSABLE = (OverflowError, UnicodeError, RecursionError)
"""What a value raises, somewhere on its way, that JSON can say and nobody here can hold."""


def unusable(error: BaseException | str) -> Refusal:
    """The refusal of a request with such a value."""
    return Refusal(
        f"The request holds a value that cannot be used: {error}. Integers have 64 bits, texts are Unicode, and lists "
        "and objects are nested a few hundred levels deep at most.",
        code="invalid_value",
    )


def unsupported(param: str, why: str) -> Refusal:
    """The refusal of a field that the gateway cannot honour."""
    return Refusal(f"'{param}' is not supported here: {why}", code="unsupported_parameter", param=param)
