"""Losses by name: where the function is, and what it needs. Free of torch, so that settings can be checked anywhere.

A loss of one's own is such a place too: `GRPO(loss="my_package.losses:my_loss")`. The model process imports it; nothing
is pickled.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentlightning.arguments import can_be, explained_class
from agentlightning.errors import ConfigError
from agentlightning.importing import import_environment, look_where_the_parent_does

CHECK_SECONDS = 120.0
"""How long importing a loss may take before it is refused."""


@explained_class
@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss and what it needs."""

    path: str
    """Where the function is: "package.module:function". It takes (entries, config), a `learner.loss.Entries` and a
    `learner.base.LossConfig`, and gives the loss and which entries were clipped."""
    clips: bool = False
    """It uses `clip_low` and `clip_high`."""
    clip: tuple[float, float] = (0.2, 0.28)
    """What these two are where a run does not say: the paper's. For a clipped ratio DAPO's (arXiv 2503.14476)."""
    on_policy: bool = False
    """It is right for the weights that sampled only: a step's rollouts can be gone through once."""
    reference: bool = False
    """It compares with the reference model (`entries.reference`)."""
    pairs: bool = False
    """It is for pairs of a preferred rollout and another; a group of siblings must not be split between passes."""
    whole: bool = False
    """It multiplies one ratio of a whole conversation by the advantage, which must be the same for all its tokens."""

    @property
    def own(self) -> bool:
        """Whether it comes from outside the package."""
        return not self.path.startswith("agentlightning.")


_HERE = "agentlightning.learner.loss"
LOSSES: dict[str, LossSpec] = {
    "cispo": LossSpec(f"{_HERE}:cispo", clips=True, clip=(1.0, 2.0)),
    "clip_cov": LossSpec(f"{_HERE}:clip_cov", clips=True, clip=(0.2, 0.2)),
    "dpo": LossSpec(f"{_HERE}:dpo", reference=True, pairs=True),
    "dppo_kl": LossSpec(f"{_HERE}:dppo_kl", clips=True, clip=(0.05, 0.05)),
    "dppo_tv": LossSpec(f"{_HERE}:dppo_tv", clips=True),
    "dual_clip": LossSpec(f"{_HERE}:dual_clip", clips=True, clip=(0.2, 0.2)),
    "gmpo": LossSpec(f"{_HERE}:gmpo", clips=True, clip=(0.4, 0.4), whole=True),
    "gspo": LossSpec(f"{_HERE}:gspo", clips=True, clip=(3e-4, 4e-4)),
    "kl_cov": LossSpec(f"{_HERE}:kl_cov"),
    "ppo_clip": LossSpec(f"{_HERE}:ppo_clip", clips=True),
    "reinforce": LossSpec(f"{_HERE}:reinforce", on_policy=True),
    "sapo": LossSpec(f"{_HERE}:sapo"),
}


def as_loss(given: str | Callable[..., Any] | LossSpec) -> LossSpec:
    """What a name in the table, an import path, a function or a spec means. Raises ConfigError for anything else."""
    if isinstance(given, LossSpec):
        return given
    if isinstance(given, str):
        if given in LOSSES:
            return LOSSES[given]
        if ":" in given:
            return LossSpec(given)
        path = "a function's import path 'package.module:function'"
        raise ConfigError(f"loss is {given!r}; {can_be(given, LOSSES, path)}")
    if isinstance(given, type):
        instead = f"An algorithm takes the place of GRPO: {given.__name__}(model=…)."
        raise ConfigError(f"loss is the class {given.__name__}; {can_be(given.__name__, LOSSES)} {instead}")
    return LossSpec(import_path(given))


def compares_siblings(loss: str) -> bool:
    """Whether a loss looks at a group as a whole; one from outside the package may."""
    return next((spec.pairs for name, spec in LOSSES.items() if loss in (name, spec.path)), True)


def import_path(function: Callable[..., Any]) -> str:
    """Where another process finds the function. Raises ConfigError, with the next step, if it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    advice = "Put it at the top level of a file of its own next to your script, for example losses.py, and import it."
    if module is None or name is None or "<" in name:
        raise ConfigError(
            f"The loss {function!r} has no import path by which the model process could find it. {advice}"
        )
    if module == "__main__":
        raise ConfigError(
            f"The loss {name} is defined in the script that is run, which the model process cannot import without "
            f"running it again. {advice}"
        )
    return f"{module}:{name}"


@functools.cache
def find_loss(name: str) -> Callable[..., Any]:
    """The function of a loss by its name or import path. Raises ConfigError when there is none."""
    path = as_loss(name).path
    module, _, attribute = path.partition(":")
    look_where_the_parent_does()
    try:
        found: Any = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"The loss '{path}' cannot be imported: {error}. Looked in {', '.join(sys.path)}.") from error
    try:
        inspect.signature(found).bind(None, None)
    except (TypeError, ValueError):
        raise ConfigError(f"The loss '{path}' must be a function of (entries, config).") from None
    return found


def check_loss(spec: LossSpec) -> None:
    """Import a loss from outside the package as the model process will: in a fresh Python, from the same places.

    Raises ConfigError with what that Python says.
    """
    if not spec.own:
        return
    code = (
        "import sys\n"
        "from agentlightning.errors import ConfigError\n"
        "from agentlightning.learner.catalog import find_loss\n"
        "try: find_loss(sys.argv[1])\n"
        "except ConfigError as error: sys.exit(str(error))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, spec.path],
            env=import_environment(),
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Importing the loss '{spec.path}' took more than {CHECK_SECONDS:g} s.") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ConfigError(f"The loss '{spec.path}' does not work in a process of its own: {lines[-1]}")
