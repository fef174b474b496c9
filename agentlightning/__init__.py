"""Agent Lightning: train any LLM agent with (almost) no change to its code.

    import agentlightning as agl

    @agl.rollout
    async def my_agent(task, llm): ...          # your agent; returns a reward

    agl.Trainer(algorithm=agl.GRPO(model="calc")).fit(my_agent, tasks)

Names are loaded when they are used, so that importing the package is cheap and needs neither torch nor any framework.
"""

from __future__ import annotations

from agentlightning.terminal import end_scripts_in_words

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
