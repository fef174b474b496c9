"""How an attempt ended: its outcome, and the words for what went wrong, with what an agent's exception probably means
here (the mistakes that everybody makes once) and what mends it. Pure.

Clients are recognised by the names of their errors: none of them is imported.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from ssl import SSLError
from typing import Protocol
from urllib.error import HTTPError
from urllib.request import getproxies, proxy_bypass

from agentlightning.errors import AgentError, AgentLightningError, message_of, own_text
from agentlightning.frames import is_own
from agentlightning.keys import redacted
from agentlightning.runner.frameworks import CLIENT, causes, framework_of, in_its_words
from agentlightning.runner.lines import OTHER_PROVIDER, hint_of_line, hint_of_task, output_of_command
from agentlightning.runner.versions import other_version
from agentlightning.store.operations.codec import readable
from agentlightning.types import Outcome

MOST_CHARACTERS = 64_000
"""The longest text of an error; a longer one loses its middle."""
_PACKAGE = Path(__file__).parents[1]
_OURS = tuple(f"{_PACKAGE / name}{os.sep}" for name in ("runner", "litagent"))


class GatewaySummary(Protocol):
    """What the gateway saw of an attempt."""

    @property
    def calls(self) -> int: ...

    @property
    def limit(self) -> str | None:
        """The limit of the run that ended it: a call was refused or cut off there, and the agent did not go on."""
        ...

    @property
    def infra_error(self) -> str | None:
        """Why a call failed for a reason that is not the agent's."""
        ...

    @property
    def forwarded(self) -> int:
        """Answers of other providers."""
        ...

    @property
    def refused(self) -> str | None:
        """Why the gateway itself last refused a call."""
        ...

    @property
    def refused_by_provider(self) -> str | None:
        """Which call another provider refused for good."""
        ...

    @property
    def lost(self) -> str | None:
        """Why calls that were answered are missing in the store, or may be."""
        ...

    @property
    def rewarded(self) -> bool:
        """Whether a reward came by HTTP."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended."""

    outcome: Outcome
    error: str | None = None
    rewarded: bool = True
    """Whether a reward is known by now. One may have come to the gateway by HTTP instead."""
    exception: BaseException | None = None
    """What the agent, its tracer or its judge raised."""


def with_gateway(ending: Ending, summary: GatewaySummary) -> Ending:
    """The ending, corrected by what the gateway saw: a failure of the system, or a limit that the agent reached.

    An attempt whose calls are not all recorded is tried again, however its agent ended: what it earned belongs to calls
    that nobody has. Clients raise when they are refused at a limit, so an agent's error after that is truncation: it is
    trained with what was earned by then, or with 0. Where the model in training had answered and another provider
    refused, that one was the judge (or a tool that is one): the agent did not fail.
    """
    if summary.lost and ending.outcome is not Outcome.CANCELLED:
        return Ending(Outcome.INFRA_ERROR, "\n".join(filter(None, (summary.lost, ending.error))))
    if ending.outcome is Outcome.AGENT_ERROR and summary.infra_error:
        message, _, way = (ending.error or "").partition("\n")
        # A client may repeat what the gateway answered.
        sentence = message if summary.infra_error not in message else ""
        return Ending(Outcome.INFRA_ERROR, "\n".join(filter(None, (summary.infra_error, sentence, way))))
    if ending.outcome is Outcome.AGENT_ERROR and summary.refused_by_provider and summary.calls:
        return Ending(Outcome.JUDGE_ERROR, f"{summary.refused_by_provider}\n{ending.error}")
    if ending.outcome is Outcome.AGENT_ERROR and summary.refused_by_provider and not summary.forwarded:
        ending = replace(ending, error=_after_the_first_line(ending.error or "", summary.refused_by_provider))
    if ending.outcome is Outcome.AGENT_ERROR and summary.limit:
        return Ending(Outcome.TRUNCATED, f"{summary.limit}\n{ending.error}")
    unanswered = _unanswered(ending, summary)
    if unanswered is not None:
        return unanswered
    if ending.outcome is Outcome.OK:
        outcome = Outcome.TRUNCATED if summary.limit else Outcome.OK
        return Ending(outcome, rewarded=ending.rewarded or summary.rewarded)
    if summary.refused_by_provider:
        return ending  # its client has the right address and key: the refusal came through the gateway
    return _with_hint(ending, was_called=summary.calls > 0, forwarded=summary.forwarded > 0)


def _after_the_first_line(error: str, words: str) -> str:
    message, _, way = error.partition("\n")
    return "\n".join(filter(None, (message, words, way)))


def _with_hint(ending: Ending, *, was_called: bool, forwarded: bool) -> Ending:
    """The ending with the probable cause of its exception, now that it is known whether a model had answered."""
    hint = (hint_with_calls if was_called else hint_without_calls)(ending.exception)
    if hint is None and forwarded and not isinstance(ending.exception, AgentLightningError | None):
        hint = _hint_of_answers(ending.exception)
    if hint == OWN_ADDRESS and forwarded:
        hint = OTHER_PROVIDER
    if not hint or not ending.error:
        return ending
    error, own_key = ending.error, in_its_words(OWN_KEY, ending.exception)
    message, _, way = (error.replace(f"\n{own_key}", "") if was_called else error).partition("\n")
    return replace(ending, error="\n".join(filter(None, (message, in_its_words(hint, ending.exception), way))))


def _unanswered(ending: Ending, summary: GatewaySummary) -> Ending | None:
    """The ending of an attempt whose model calls were all refused: whatever it earned, the model has no part in it."""
    if summary.refused is None or summary.calls or summary.forwarded or summary.limit:
        return None
    why = f"None of its model calls was answered. The last one: {summary.refused}"
    if ending.outcome is Outcome.OK:
        return Ending(Outcome.AGENT_ERROR, why)
    if ending.outcome is Outcome.AGENT_ERROR and summary.refused not in (ending.error or ""):
        return replace(ending, error="\n".join(filter(None, (ending.error, why))))
    return None


def describe(error: BaseException, task: object = None) -> str:
    """The message, its probable cause, and the way through the user's own files (or, if none, all files)."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:  # of a TaskGroup
        return describe(error.exceptions[0], task)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    own = [f for f in frames if is_own(f.filename)]
    hint = hint_for(error) or hint_of_task(error, task) or output_of_command(error)
    trace = "".join(traceback.format_list(own or frames))
    message = ": ".join(filter(None, (type(error).__name__, re.sub(r":\s*\n\s*", ": ", message_of(error), count=1))))
    sentence = "\n".join(filter(None, (message, hint and in_its_words(hint, error))))
    text = redacted(f"{sentence}\n{trace}".rstrip())
    if not isinstance(error, BaseExceptionGroup):
        return text
    return "\n".join([text, *(f"one of them: {describe(e)}" for e in error.exceptions[:3])])


def close_unawaited(error: BaseException) -> None:
    """Close the coroutines that an error left behind: its words say that they are not awaited, and Python would say it
    again of each, at whatever line runs when they are cleared away."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in [] if frame.f_code.co_filename.startswith(str(_PACKAGE)) else frame.f_locals.values():
            if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
                value.close()


def storable(text: str | None) -> str | None:
    """An error's text as any database takes it: Unicode without NUL, and not endless."""
    if text is None:
        return None
    dropped = len(text) - MOST_CHARACTERS
    if dropped > 0:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}\n… {dropped} characters left out …\n{text[-half:]}"
    return readable(text)


OWN_ADDRESS = (
    "Its client talks to another address than the model's. Give it the endpoint of the rollout:  "
    f"{CLIENT}  and  model=llm.model."
)
OWN_KEY = (
    "No account is needed, and no environment variable: give the client the key of the rollout,  "
    f"{CLIENT}. Anthropic(…) takes the same two."
)
OWN_MODEL = (
    "None of its calls arrived at the model in training. Give the agent that model, whatever its name is elsewhere:  "
    f"{CLIENT}  and  model=llm.model."
)
_OTHER_KEY = (
    "The model in training had answered already, so this client is another one's, of a judge or a tool: give it its "
    "own address and key. Or name the judge, Trainer(models={'judge': agl.Provider(base_url=…, api_key=…)}), and ask "
    "for model='judge' at llm.endpoint."
)
_OTHER_ADDRESS = (
    "The model in training had answered already, so this is another address, of a judge or a tool, and nothing answers "
    "there: look at its base_url."
)
_ADDRESS_OF_A_PROGRAM = (
    "None of its model calls arrived. A program finds the model in its environment: OPENAI_BASE_URL, OPENAI_API_KEY "
    "and OPENAI_MODEL (and the same of ANTHROPIC_ and GEMINI_). OpenAI() without arguments reads the first two."
)
_NO_SUCH_PART = f"What the agent is given as llm has three parts: {CLIENT}  and  model=llm.model."
_AWAIT_IT = "`await` is missing in front of the call that gave this coroutine."
_GATHER = "In place of asyncio.wait take  await asyncio.gather(*coroutines),  which gives their results."
_IN_A_LOOP = (
    "An async agent runs in an event loop already: await the coroutine, instead of asyncio.run(…) or "
    "run_until_complete(…)."
)
_SYNC_CLIENT = "This client's calls are not async: take AsyncOpenAI, or make the agent a plain `def` without await."
NOT_ASYNC = (
    "This call is not async: leave `await` out, and make the agent a plain `def`, which has a thread of its own."
)
NO_AWAIT = "Emitters such as emit_reward are not async: leave `await` out."
CALL_IT = "Call it there, with a name: with agl.operation('search'): …"
_NO_KEYBOARD = "An agent has nobody at the keyboard: take what it asks for from the task, in place of input()."
IN_A_THREAD = (
    "Agents run beside each other, outside the main thread, where signals cannot be used: in place of signal.alarm "
    "take asyncio.wait_for, or run what may hang with subprocess.run(…, timeout=…). Of math_verify: "
    "parse(…, parsing_timeout=None) and verify(…, timeout_seconds=None)."
)
CLOSED_CLIENT = (
    "Rollouts share what is made outside of the agent, and one has closed it: make the client inside "
    "(async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client), or leave the shared one open."
)
OTHER_LOOP = (
    "It was made in an event loop that is closed, or another one: make the client inside the agent, or in place of "
    "asyncio.run(…) in a plain `def` make the agent async."
)
_NOT_HERE = "Install the package into the environment that runs the agent."
_BEHIND_A_PROXY = (
    "HTTP_PROXY or ALL_PROXY sends its calls to a proxy, and the model answers on this machine: set "
    "NO_PROXY=127.0.0.1,localhost before you start."
)
_BY_SOCKS = (
    "ALL_PROXY or HTTPS_PROXY names a SOCKS proxy, which httpx speaks with the package socksio only, whatever NO_PROXY "
    "says. The model answers on this machine: unset ALL_PROXY and its like before you start, give the client "
    "http_client=httpx.AsyncClient(trust_env=False), or install httpx[socks]."
)
TOO_MANY_FILES = (
    "This process may open no more files: allow more (ulimit -n 4096), make one client for all rollouts, or lower "
    "concurrency."
)
HUNG_UP = (
    "It was connected, and the other side hung up. With many connections at once, make one client for all rollouts or "
    "lower concurrency; else look whether an HTTP server is at that address."
)
NO_HTTPS = (
    "The model's address begins with http://, and its client spoke https:// to it, or to another address: give it the "
    "endpoint as it is,  OpenAI(base_url=llm.endpoint, api_key=llm.api_key)."
)
TOO_HASTY = (
    "Its client waited no longer: its timeout is in seconds, and the model answers many rollouts at once. Leave "
    "timeout out or give more, such as timeout=600. The model's address is base_url=llm.endpoint; if it called another "
    "one, of a judge or a tool, look at its base_url."
)
GATEWAY_AT_IMPORT = (
    "At the top of a file there is no rollout yet: make it inside the agent, or once with base_url=agl.GATEWAY_URL and "
    "any key. "
)
SAY_JSON = (
    "The body is sent as something else than JSON: in place of data=… give requests or httpx json=…; before a text "
    "that is JSON already put the header  Content-Type: application/json."
)
_ONE_V1_ONLY = "llm.endpoint is the base URL, ending in /v1: the client itself adds /chat/completions."

_OWN_LOOP = "A plain `def` agent has a thread without a loop: take asyncio.run(…), or make the agent async and await."
_NO_DICT = (
    "Its parts are attributes, as in answer.choices[0].message.content or call.function.arguments; answer.model_dump() "
    "is a dict."
)
_BASE_URL = f"The address goes by another name there: {CLIENT}."
_NO_FUNCTION = (
    "The model is sent a description of a tool, and no Python function: tools=[{'type': 'function', 'function': "
    "{'name': …, 'description': …, 'parameters': …}}]."
)
NOT_AS_EXPECTED = (
    "The model had answered. If what it wrote is the cause, that is no failure of the agent: return a low reward for "
    "it, such as 0.0, in place of an error, so that the model learns from it."
)
NO_TEXT = (
    "In an answer that calls a tool message.content is None, and the call is in message.tool_calls. If that is the "
    "None here, take  message.content or ''  and return a low reward, such as 0.0, for an answer of the wrong form."
)
OUT_OF_TURNS = (
    "The agent's own limit of turns ended it. Raise that limit, or catch this error and return a low reward, such as "
    "0.0, so that the model learns to come to an end."
)
IN_ANOTHER_THREAD = (
    "Rollouts share what is made outside of the agent, and each sync one has a thread of its own: make it inside the "
    "agent."
)
OF_RESPONSES = "The Responses API calls it max_output_tokens; max_tokens is Chat Completions'."
OF_CHAT = "Messages go to client.chat.completions.create; completions takes prompt=, and responses input=."
_ANSWERS = r"(ChatCompletion\w*|Completion\w*|Choice|Message|Function|Response\w*|ToolUseBlock|TextBlock)"

_PYTHONS_WORDS = {
    r"'(LLM|ProxyLLM)' object (has no attribute|is not callable|is not subscriptable)": _NO_SUCH_PART,
    rf"'{_ANSWERS}' object is not subscriptable": _NO_DICT,
    r"'\w+Error' (object (has|is) no|and ')|(and|type|of:?|not) '\w+Error'": "It is the error of a call: raise it.",
    r"'NoneType' .* '(total|prompt|completion)_tokens'": "A stream counts tokens in its last chunk, and only with "
    "stream_options={'include_usage': True}.",
    r"There is no current event loop in thread": _OWN_LOOP,
    r"unexpected keyword argument '(endpoint|api_base|url|host|openai_api_base)'": _BASE_URL,
    r"create\(\) got an unexpected keyword argument 'base_url'": _BASE_URL,
    r"Object of type (function|builtin_function_or_method|method|type) is not JSON serializable": _NO_FUNCTION,
    r"Responses\.create\(\) got an unexpected keyword argument 'max_tokens'": OF_RESPONSES,
    r"^Missing required arg.*'prompt'|create\(\) got an unexpected keyword argument 'messages'": OF_CHAT,
    r"(^|\b(got|not|type|and|of)\b|[,:]) ?'?coroutine\b(?! (was|raised|ignored))": _AWAIT_IT,
    r"^Passing coroutines is forbidden": _GATHER,
    r"'_(GatheringFuture|asyncio\.Future|asyncio\.Task)'": _AWAIT_IT.replace("coroutine", "future"),
    r"^'?(OPENAI|ANTHROPIC|GEMINI|GOOGLE|AZURE)_[A-Z_]+'?$": OWN_KEY,
    r"asyncio\.run\(\) cannot be called from a running event loop|event loop is already running": _IN_A_LOOP,
    rf"^object ({_ANSWERS}|Stream)\b.* can't be used in 'await' expression": _SYNC_CLIENT,
    r"^object Span can't be used in 'await' expression": NO_AWAIT,
    r"^object \w+ can't be used in 'await' expression": NOT_ASYNC,
    r"'function' object does not support the (asynchronous )?context manager protocol": CALL_IT,
    r"does not support the context manager protocol": "Where it is an asynchronous one: async with … as …:",
    r"does not support the asynchronous context manager protocol": "It is not asynchronous: leave `async` out.",
    r"^No module named": _NOT_HERE,
    r"SOCKS.*\bsocks(io)?\b": _BY_SOCKS,
    r"^signal only works in main thread|usage of signal\.alarm": IN_A_THREAD,
    r"^Cannot send a request, as the client has been closed|^Session is closed": CLOSED_CLIENT,
    r"^Event loop is closed|is bound to a different event loop|attached to a different loop": OTHER_LOOP,
    r"^EOF when reading a line": _NO_KEYBOARD,
    r"^SQLite objects created in a thread can only be used in that same thread": IN_ANOTHER_THREAD,
}
"""Python's words for a mistake, and the hint that goes with them."""
_NOT_CONNECTED = (
    *("APIConnectionError", "APITimeoutError", "ConnectError", "ConnectTimeout", "ClientConnectorError"),
    *("ConnectionError", "ConnectTimeoutError", "NewConnectionError", "ProxyError", "ClientProxyConnectionError"),
    *("URLError", "gaierror"),
)
"""Errors of clients whose call arrived nowhere, by the name of their class or of a class above it."""
_KEY_REFUSED = ("AuthenticationError", "ModelAuthenticationError")
_HUNG_UP = ("RemoteProtocolError", "RemoteDisconnected", "ServerDisconnectedError", "ConnectionResetError", "ReadError")
"""Errors of a connection that was made and that the other side ended."""
_TIMED_OUT = ("APITimeoutError", "TimeoutException", "Timeout", "ServerTimeoutError", "TimeoutError")
"""Errors of a client that waited no longer, for the connection or for the answer."""
_CLIENTS = ("openai", "anthropic", "httpx", "httpx2", "requests", "urllib", "urllib3", "aiohttp", "google", "litellm")
_ERRORS_OF_PROGRAMS = re.compile(
    rf"\b({'|'.join(_NOT_CONNECTED)}|AuthenticationError|ECONNREFUSED|ENOTFOUND|Connection refused)\b"
)
_OF_TEXTS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, SyntaxError)
"""Errors of code that reads a text of another form than it expects."""
_OF_ITS_CODE = ("DatabaseError", "CalledProcessError")
"""Errors of queries and programs, which a model may have written."""
_RUNS = re.compile(r"\b(exec|eval)\(")
_NONE_FOR_TEXT = re.compile(
    r"(not|got) '?NoneType'?$|argument of type 'NoneType'|^'NoneType' object has no attribute "
    r"'(strip|lower|upper|split|find|replace|startswith|endswith|partition)'"
)
"""Python's words for a None where a text is read."""
_WANTS_A_KEY = re.compile(r"api_key|credentials|authentication method|API[ _]key", re.IGNORECASE)
_OF_A_MODELS_NAME = re.compile(r"\b([Mm]odels?|[Pp]rovider|[Pp]refix|litellm|Chat(?!Completion)[A-Z]\w+)\b")
"""Words of frameworks that do not know a model by the name that they are given."""
_NO_VALUE = re.compile(r"Illegal header value b'(Bearer )?'")
"""The words of a client that was given a key without characters."""
_OF_TURNS = ("MaxTurnsExceeded", "GraphRecursionError", "UsageLimitExceeded", "AgentMaxStepsError")
"""Errors of frameworks that end an agent which goes on and on."""
_OF_ANSWERS = (
    *("UnexpectedModelBehavior", "ModelBehaviorError", "OutputParserException", "StructuredOutputError"),
    *("InstructorRetryException", "IncompleteOutputException", "AgentParsingError", "AdapterParseError"),
    "LengthFinishReasonError",
)
"""Errors of frameworks about what the model wrote."""


def hint_for(error: BaseException) -> str | None:
    """The probable cause of the error, or of one that a framework's error wraps; None where none is known."""
    if any(_NO_VALUE.search(message_of(each)) for each in causes(error)):
        return OWN_KEY
    if type(error).__module__ == "builtins" or framework_of(error) is None:
        return _hint_for_one(error)
    return next(filter(None, map(_hint_for_one, causes(error))), None)


def _hint_for_one(error: BaseException) -> str | None:
    text, module = message_of(error), type(error).__module__.split(".")[0]
    if module in ("openai", "anthropic", "httpx", "builtins") or framework_of(error) is not None:
        # With another status it had a key, and was refused something.
        answered = getattr(error, "status_code", None) not in (None, 401, 403)
        if (
            not answered
            and not isinstance(error, KeyError)
            and not _is(error, _KEY_REFUSED)
            and _WANTS_A_KEY.search(text)
        ):
            return OWN_KEY
        if "/chat/completions/chat/completions" in text or "/v1/v1/" in text:
            return _ONE_V1_ONLY
    if "415" in text and "Unsupported Media Type" in text:
        return SAY_JSON
    if (meant := hint_of_line(text, own_text(error))) is not None:
        return meant
    if module in ("builtins", "sqlite3"):
        known = next((hint for phrase, hint in _PYTHONS_WORDS.items() if re.search(phrase, text)), None)
        return known or other_version(error)
    return None


def hint_without_calls(error: BaseException | None) -> str | None:
    """The hint for an agent none of whose calls arrived at the gateway: somebody else refused them."""
    if error is None:
        return None
    if isinstance(error, AgentError):  # of a program, whose output names its errors
        return _ADDRESS_OF_A_PROGRAM if _ERRORS_OF_PROGRAMS.search(message_of(error)) else None
    if isinstance(error, HTTPError):  # an answer, although Python takes it for an error of the connection
        return None
    if any(isinstance(each, OSError) and each.errno in (errno.EMFILE, errno.ENFILE) for each in causes(error)):
        return TOO_MANY_FILES
    nowhere = _anywhere(error, _NOT_CONNECTED)
    if nowhere and _anywhere(error, _HUNG_UP):
        return HUNG_UP
    if any(isinstance(each, SSLError) for each in causes(error)):
        return NO_HTTPS
    known = hint_for(error) is not None
    if (nowhere or (_of_a_client(error) and not known)) and _goes_through_a_proxy():
        return _BEHIND_A_PROXY
    if _timed_out(error):
        return TOO_HASTY
    if known:
        return None
    if nowhere or (_anywhere(error, _KEY_REFUSED) and not any(_is_forbidden(each) for each in causes(error))):
        return OWN_ADDRESS
    of_a_model = _OF_A_MODELS_NAME.search(message_of(error))
    if not of_a_model and _anywhere(error, ("ImportError",)):
        return _NOT_HERE
    unknown = framework_of(error) is not None and of_a_model
    return OWN_MODEL if unknown else None


def hint_with_calls(error: BaseException | None) -> str | None:
    """The hint for an agent whose model had answered: the mistake is with another client of the agent."""
    if error is None or isinstance(error, AgentLightningError):
        return None
    if _anywhere(error, ("ImportError",)):
        return None if hint_for(error) is not None else _NOT_HERE
    if hint_for(error) == OWN_KEY or _anywhere(error, _KEY_REFUSED):
        return _OTHER_KEY
    if _timed_out(error):
        return TOO_HASTY
    if _anywhere(error, _NOT_CONNECTED):
        return _OTHER_ADDRESS
    return _hint_of_answers(error)


def _hint_of_answers(error: BaseException) -> str | None:
    """The hint for code that fails at what a model wrote, or did not come to an end with."""
    if _is(error, _OF_TURNS):
        return OUT_OF_TURNS
    if _is(error, _OF_ANSWERS):
        return NOT_AS_EXPECTED
    reads = isinstance(error, _OF_TEXTS) or _is(error, _OF_ITS_CODE) or _RUNS.search(own_text(error))
    if not reads or hint_for(error) is not None:
        return None
    return NO_TEXT if _NONE_FOR_TEXT.search(message_of(error)) else NOT_AS_EXPECTED


def _is_forbidden(error: BaseException) -> bool:
    """A client of another rollout, which the gateway refuses in words; frameworks call that a wrong key."""
    return getattr(error, "status_code", None) == 403


def _timed_out(error: BaseException) -> bool:
    """urllib3 counts a connection that was refused as one that took too long."""
    return any(_is(each, _TIMED_OUT) and not _is(each, ("NewConnectionError",)) for each in causes(error))


def _anywhere(error: BaseException, names: Sequence[str]) -> bool:
    """Whether the error or one that it came from is of these."""
    return any(_is(each, names) for each in causes(error))


def _is(error: BaseException, names: Sequence[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _of_a_client(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _CLIENTS


def _goes_through_a_proxy() -> bool:
    """Whether the environment sends calls to this very machine to a proxy."""
    return bool({"http", "all"} & getproxies().keys()) and not proxy_bypass("127.0.0.1")
