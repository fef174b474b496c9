"""The errors users see, named by the boundary that failed. Every message says what happened and what to do next.

AgentLightningError
├── ConfigError      a setting is wrong, unknown or unused
│   ├── KindError            an argument is of another kind than is taken; a TypeError too
│   ├── VariableError        an environment variable says what it cannot mean; a ValueError too
│   └── GraderRefused        a grader of the fine-tuning API cannot be honoured; it names the field
├── ModelError       a model cannot be loaded, rendered, or sampled from
├── AgentError       the user's agent did something that cannot be trained on
│   ├── UnknownResourceError  it asked for a resource that there is not; a KeyError too
│   ├── PromptTemplateError  a prompt template could not be filled; a KeyError too
│   ├── NotJsonError         it recorded what JSON cannot hold; a RuntimeError too
│   └── RewardError          a reward that is no finite number (also a TypeError and a ValueError)
├── JudgeError       what gives the reward failed, not the agent
├── ExecutorError    what runs a program elsewhere (a cluster) failed, not the agent
├── DeadlineError    what runs a program elsewhere stopped it, because its time was over
├── StoreError       the store refused or could not do an operation
│   ├── NotFoundError        no such rollout, attempt, …
│   ├── ConflictError        the operation contradicts the state that is stored
│   └── StoreUnavailableError  the store cannot work at the moment
│       └── StoreClosedError     it was closed in this process
├── GatewayError     a model call was refused by, or failed in, the gateway
└── EngineError      sampling or learning failed
    └── BackendDied          the backend ended by itself
"""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from traceback import FrameSummary


class AgentLightningError(Exception):
    """Base of all errors raised on purpose by this package. They reach a person in words: see `in_words`. Programs tell
    them apart by `code`, which stays as it is when words change."""

    code: ClassVar[str] = "error"

    def _render_traceback_(self) -> list[str]:
        """What IPython and notebooks show."""
        if not debugging():
            return in_words(self).splitlines()
        from traceback import format_exception

        return format_exception(self)


class ConfigError(AgentLightningError):
    """A setting is wrong, unknown or unused."""

    code = "config"


class VariableError(ConfigError, ValueError):
    """An environment variable says what it cannot mean."""

    code = "variable"


class KindError(ConfigError, TypeError):
    """An argument is of another kind than is taken."""

    code = "kind"


class GraderRefused(ConfigError):
    """A grader of the fine-tuning API that is wrong, or cannot be honoured here."""

    code = "grader"

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param
        """The field that is why, by its path, such as `grader.graders.exact.operation`."""


class ModelError(AgentLightningError):
    """A model cannot be loaded, rendered, or sampled from."""

    code = "model"


class AgentError(AgentLightningError):
    """The agent did something that cannot be trained on (no reward, no model call, wrong return type)."""

    code = "agent"


class UnknownResourceError(AgentError, KeyError):
    """The agent asked for a resource by a name that there is not."""

    code = "unknown_resource"

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class PromptTemplateError(AgentError, KeyError):
    """A prompt template could not be filled with what it was given."""

    code = "prompt_template"

    __str__ = Exception.__str__


class NotJsonError(AgentError, RuntimeError):
    """A value to record that JSON cannot hold."""

    code = "not_json"


class RewardError(AgentError, TypeError, ValueError):
    """A reward that is no finite number, or of whose parts none is the one that trains."""

    code = "reward"


class JudgeError(AgentLightningError):
    """What gives the reward (a grader, a judge) failed; the agent may have done well."""

    code = "judge"


class ExecutorError(AgentLightningError):
    """What runs a program elsewhere, a Kubernetes cluster, failed; the agent may have done well."""

    code = "executor"


class DeadlineError(AgentLightningError):
    """What runs a program elsewhere stopped it, because the attempt's time was over."""

    code = "deadline"


class StoreError(AgentLightningError):
    """The store refused or could not do an operation."""

    code = "store"


class NotFoundError(StoreError, ValueError):
    """No such rollout, attempt, resource, worker or run."""

    code = "not_found"


class ConflictError(StoreError):
    """The operation contradicts the state that is stored (finishing an attempt twice with different results, …)."""

    code = "conflict"


class StoreUnavailableError(StoreError):
    """The store cannot work at the moment (closed, full disk, locked file, not reachable); nothing is lost by it."""

    code = "store_unavailable"


class StoreClosedError(StoreUnavailableError):
    """The store was closed in this process: for whoever is here it does not come back."""

    code = "store_closed"


class GatewayError(AgentLightningError):
    """A model call was refused by, or failed in, the gateway."""

    code = "gateway"


class EngineError(AgentLightningError):
    """Sampling or learning failed, or what does them died."""

    code = "engine"


class BackendDied(EngineError):
    """What samples and learns ended by itself: out of memory, killed, a crash in a library. Another start may go on
    from the last checkpoint."""

    code = "backend_died"


def missing_extra(extra: str, package: str) -> ConfigError:
    """The error for a feature whose optional dependency is not installed, with the command that installs it here."""
    from agentlightning.installation import install_command

    return ConfigError(f"This needs the package '{package}'. Install it with:  {install_command(extra)}")


def message_of(error: BaseException) -> str:
    """What an error says; never fails, whatever its class makes of `str`."""
    try:
        return str(error)
    except Exception as failure:  # a __str__ of the user's own
        return f"(its message cannot be shown: {type(failure).__name__})"


_DIFFERS = re.compile(
    r"0x[0-9a-f]+|/tmp/[\w./-]+|\b[0-9a-f]{8}[0-9a-f-]*\b|\d+(\.\d+)?|'[^'\n]*'|\"[^\"\n]*\"", re.IGNORECASE
)


def kind_of(message: str) -> str:
    """A message without what differs from one time to the next: numbers, ids, temporary folders and quoted words.

    Equal failures of several rollouts are counted by it.
    """
    return _DIFFERS.sub("…", message)


def message_of_ray(error: BaseException) -> str:
    """What Ray says of the end of a process, without the names it gives things and its guesses."""
    lines = [line.strip() for line in str(error).splitlines()]
    words = " ".join(line for line in lines if line and not re.match(r"\w+: ", line))
    return words.partition(" Some common causes")[0] or type(error).__name__


# ---- how an error is shown -----------------------------------------------------------------------------------------


def debugging() -> bool:
    """Whether the user asked for whole tracebacks, with `AGL_DEBUG=1`."""
    return os.environ.get("AGL_DEBUG", "0").lower() not in ("", "0", "false", "no")


def in_words(error: BaseException) -> str:
    """What happened and what to do next, and the line of the user's own that it came through; none of our frames."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"Error: {message_of(error)}{notes}{_where(error)}"


def _where(error: BaseException) -> str:
    place = own_line(error)
    return f"\n(It came through {place}; AGL_DEBUG=1 shows the whole way.)" if place else ""


def own_line(error: BaseException) -> str:
    """The innermost line of the user's own that an error came through, as "FILE, line N"; empty if there is none."""
    frame = _own_frame(error)
    return f"{frame.filename}, line {frame.lineno}" if frame else ""


def own_text(error: BaseException) -> str:
    """What is written in that line."""
    frame = _own_frame(error)
    return (frame.line or "") if frame else ""


def _own_frame(error: BaseException) -> FrameSummary | None:
    from traceback import extract_tb

    from agentlightning.frames import is_own

    return next((frame for frame in reversed(extract_tb(error.__traceback__)) if is_own(frame.filename)), None)


# ---- errors of the machine -----------------------------------------------------------------------------------------

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)
_OF_PATHS = (errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)
_MAKE_SPACE = (
    "Make room on the disk and type the command again; a training goes on with --resume from its last checkpoint."
)


def of_the_machine(error: BaseException) -> str | None:
    """The words for a full disk, too many open files, or a path that cannot be used; None for another error."""
    if not isinstance(error, OSError):
        return None
    if error.errno is None and (of_one := re.search(r"'([^']*)', [\"']\[Errno (\d+)\]", str(error))):  # shutil.Error
        error = OSError(int(of_one[2]), os.strerror(int(of_one[2])), of_one[1])
    what, why = f"'{error.filename}'" if error.filename else "A file", error.strerror
    if error.errno in _FULL:
        return f"{what} could not be written: {why}. {_MAKE_SPACE}"
    if error.errno in _NO_MORE_FILES:
        return f"{what} could not be opened: {why}. Allow more (ulimit -n 4096), and start again."
    if error.errno == errno.EROFS:
        return f"{what} could not be written: {why}. Give a folder that can be written."
    in_the_way = error.errno in _OF_PATHS and error.filename
    return f"{what} cannot be used: {why}. (AGL_DEBUG=1 shows the whole way.)" if in_the_way else None


def came_from_here(error: BaseException) -> bool:
    """Whether this package failed below the last line of the user's own that the error came through."""
    from traceback import extract_tb

    from agentlightning.frames import is_ours, is_own

    frames = [frame.filename for frame in extract_tb(error.__traceback__)]
    own = max((number for number, name in enumerate(frames) if is_own(name)), default=-1)
    return any(map(is_ours, frames[own + 1 :]))
