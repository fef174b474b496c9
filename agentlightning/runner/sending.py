"""An agent on its way to a process on another machine: pickled, or else with the source of the module that it is from.

Many agents stand beside what cannot be copied, a client of a provider for example. Their module is then run again where
they arrive, under its name; what it imports must be there.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.litagent import FunctionAgent, LitAgent

_MAIN = "__main__"
_SENT_MAIN = "__agl_main__"
"""What the main program is called where it arrives, so that what it does when it is run is left out."""


@dataclass(frozen=True, slots=True)
class Written:
    """A module: its name, its file, and what is in it."""

    name: str
    file: str
    source: str

    def run(self) -> ModuleType:
        """The module, made from its source; one that is there already is taken."""
        if self.name in sys.modules:
            return sys.modules[self.name]
        folder = Path(self.file).parent
        for package in reversed(_parents(self.name)):
            if package not in sys.modules:
                sys.modules[package] = ModuleType(package)
                sys.modules[package].__path__ = [str(folder)]
            folder = folder.parent
        module = sys.modules[self.name] = ModuleType(self.name)
        module.__file__ = self.file
        module.__package__ = self.name.rpartition(".")[0]
        exec(compile(self.source, self.file, "exec"), vars(module))
        return module


@dataclass(frozen=True, slots=True)
class Sent:
    """An agent in a form that travels."""

    pickled: bytes | None
    written: Written | None = None
    attribute: str = ""
    """Of the module that was written: the agent, or the function that it calls."""

    def agent(self) -> LitAgent[Any]:
        """The agent, where it arrived."""
        module = None if self.written is None else self.written.run()
        if self.pickled is not None:
            return pickle.loads(self.pickled)
        found = getattr(module, self.attribute)
        return found if isinstance(found, LitAgent) else FunctionAgent(found)


def sent(agent: LitAgent[Any]) -> Sent:
    """Raises ConfigError for an agent that cannot be sent."""
    module = _module_of(agent)
    written = None if module is None else _written(module)
    name = None if module is None else _attribute(agent, module)
    is_main = module is not None and module.__name__ == _MAIN
    if written is not None and name is not None and not is_main:
        return Sent(None, written, name)
    try:
        return Sent(_copied(agent, is_main), None if is_main else written)
    except Exception as error:  # whatever the objects of a user say when they are pickled
        if written is None or name is None:
            raise _unsendable(error) from error
        return Sent(None, written, name)


def _copied(agent: LitAgent[Any], is_main: bool) -> bytes:
    """What it is made of, by name where the other side finds it by its name."""
    if not is_main:
        with suppress(Exception):
            return pickle.dumps(agent)
    from ray import cloudpickle  # pyright: ignore[reportMissingImports]

    return cloudpickle.dumps(agent)  # pyright: ignore[reportPrivateImportUsage]


def _written(module: ModuleType) -> Written | None:
    """The source of a module that the other side does not have; of the main program if it can be run again without
    doing again what it does."""
    if module.__name__ == _MAIN:
        return _main_of(module)
    return None if _is_installed(module) else Written(module.__name__, str(module.__file__), inspect.getsource(module))


def _main_of(module: ModuleType) -> Written | None:
    """The main program's source, if it can be run again without doing again what it does."""
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        return None
    source = Path(file).read_text()
    return Written(_SENT_MAIN, file, source) if _MAIN in source else None


def _module_of(agent: LitAgent[Any]) -> ModuleType | None:
    described = inspect.unwrap(agent.function) if isinstance(agent, FunctionAgent) else type(agent)
    return sys.modules.get(getattr(described, "__module__", None) or "")


def _is_installed(module: ModuleType) -> bool:
    """Whether the other machine finds it by its name: packages are the same there."""
    file = str(getattr(module, "__file__", None) or "")
    return not file or "site-packages" in file or module.__name__.partition(".")[0] == "agentlightning"


def _attribute(agent: LitAgent[Any], module: ModuleType) -> str | None:
    """The name under which the module has the agent, or the function that it calls."""
    wanted = [agent, *([agent.function] if isinstance(agent, FunctionAgent) else [])]
    return next((name for name, value in vars(module).items() if any(value is one for one in wanted)), None)


def _parents(name: str) -> list[str]:
    """The packages that a module is in, the outermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _unsendable(error: Exception) -> ConfigError:
    return ConfigError(
        f"The agent cannot be sent to runners on Ray: {type(error).__name__}: {error}. Put it into a file that is "
        "imported, or what the main program does under `if __name__ == '__main__':`; or run it in this process: "
        "Trainer(strategy='inline')."
    )
