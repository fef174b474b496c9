"""Agent Lightning: train any LLM agent with (almost) no change to its code.

    import agentlightning as agl

    @agl.rollout
    async def my_agent(task, llm): ...          # your agent; returns a reward

    agl.Trainer(algorithm=agl.GRPO(model="calc")).fit(my_agent, tasks)

Names are loaded when they are used, so that importing the package is cheap and needs neither torch nor any framework.
"""

from __future__ import annotations

import os
import sys

try:
    from agentlightning.terminal import end_scripts_in_words
except (
    ImportError,
    AttributeError,
) as error:  # a file named types.py fails here already
    file = getattr(error, "path", None) or getattr(getattr(error, "obj", None), "__file__", None) or ""
    if sys.path and os.path.dirname(file) == os.path.abspath(sys.path[0]):
        module = os.path.splitext(os.path.basename(file))[0]
        error.add_note(f"{file} is a file of yours, and hides the package {module!r}: give the file another name.")
    raise

end_scripts_in_words()  # first: a script named random.py fails at what the others import

from typing import Any  # noqa: E402

from agentlightning import lazy  # noqa: E402
from agentlightning.compat import finder, lookup  # noqa: E402

__version__ = "0.3.0"

_load, __dir__, _names = lazy.attach(__name__)
__all__ = ["__version__", *_names]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    return _load(name) if name in _names else lookup.resolve(__name__, name)


finder.install()
