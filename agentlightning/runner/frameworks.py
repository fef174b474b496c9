"""How each framework is given a rollout's model, which framework an error came through, and whose cache is on.

Frameworks are told apart by the files of a traceback, and read where the agent has imported them: none is imported.
What it is not: the table of what was tried with them, which is docs/clients.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from traceback import walk_tb
from types import ModuleType
from typing import Any

CLIENT = "OpenAI(base_url=llm.endpoint, api_key=llm.api_key)"
"""The line that advice about a client's address and key gives where no framework is involved."""
_CLIENTS = re.compile(rf"{re.escape(CLIENT)}(  and  model=llm\.model|\. Anthropic\(…\) takes the same two)?")
_LANGCHAIN = "ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)"
_LITELLM = 'litellm.acompletion(f"openai/{llm.model}", api_base=llm.endpoint, api_key=llm.api_key, …)'
FRAMEWORKS = {
    "agent_framework_openai": "OpenAIChatClient(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)",
    "agents": "OpenAIResponsesModel(llm.model, AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key))",
    "agentscope": "OpenAIChatModel(OpenAICredential(base_url=llm.endpoint, api_key=llm.api_key), llm.model)",
    "agno": "OpenAILike(llm.model, base_url=llm.endpoint, api_key=llm.api_key)",
    "autogen_ext": "OpenAIChatCompletionClient(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key, "
    "model_info=…)",
    "crewai": 'LLM(f"openai/{llm.model}", base_url=llm.endpoint, api_key=llm.api_key)',
    "dspy": 'dspy.LM(f"openai/{llm.model}", api_base=llm.endpoint, api_key=llm.api_key, cache=False)',
    "google.adk": 'LiteLlm(f"openai/{llm.model}", api_base=llm.endpoint, api_key=llm.api_key)',
    "google.genai": 'genai.Client(api_key=llm.api_key, http_options={"base_url": llm.endpoint})',
    "langchain": _LANGCHAIN,
    "langchain_anthropic": "ChatAnthropic(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)",
    "langchain_openai": _LANGCHAIN,
    "llama_index": "OpenAILike(model=llm.model, api_base=llm.endpoint, api_key=llm.api_key, is_chat_model=True, …)",
    "pydantic_ai": "OpenAIChatModel(llm.model, provider=OpenAIProvider(base_url=llm.endpoint, api_key=llm.api_key))",
    "smolagents": "OpenAIServerModel(llm.model, api_base=llm.endpoint, api_key=llm.api_key)",
    "strands": 'OpenAIModel(client_args={"base_url": llm.endpoint, "api_key": llm.api_key}, model_id=llm.model)',
    "litellm": _LITELLM,
}
"""By the package that is imported, what makes its model or its client that of a rollout."""
_CACHES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dspy": (
        lambda dspy: bool(dspy.cache.enable_memory_cache and len(dspy.cache.memory_cache)),
        "DSPy keeps the answers of this agent's models: give its model cache=False, dspy.LM(…, cache=False).",
    ),
    "langchain_core.globals": (
        lambda settings: settings.get_llm_cache() is not None,
        "LangChain's cache of answers is on: turn it off with set_llm_cache(None).",
    ),
    "litellm": (
        lambda litellm: litellm.cache is not None and getattr(litellm.cache.mode, "value", "") != "default_off",
        "LiteLLM's cache of answers is on: turn it off with litellm.cache = None.",
    ),
}
"""By the module that has it: whether a framework's cache of answers is on, and what is said of it."""
_OF_ITS_OWN = re.compile(r"[\\/](?:site|dist)-packages[\\/]([\w.]+?)[\\/](?:(\w+)[\\/])?")


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from."""
    found: BaseException | None = error
    for _ in range(20):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def framework_of(error: BaseException | None) -> str | None:
    """The package of the framework nearest to where the error was raised; another's LiteLLM counts as the other."""
    if error is None:
        return None
    found = [name for each in causes(error) for name in _through(each)]
    return next((name for name in reversed(found) if name != "litellm"), found[-1] if found else None)


def _through(error: BaseException) -> Iterator[str]:
    for frame, _ in walk_tb(error.__traceback__):
        if (place := _OF_ITS_OWN.search(frame.f_code.co_filename)) is not None:
            yield from {place[1], f"{place[1]}.{place[2]}"} & FRAMEWORKS.keys()


def in_its_words(words: str, error: BaseException | None) -> str:
    """The same words with the framework's own line in place of the plain client's, where the error came through one."""
    if (framework := framework_of(error)) is None:
        return words
    return _CLIENTS.sub(lambda _: FRAMEWORKS[framework], words)


def caches_on(modules: Mapping[str, ModuleType] | None = None) -> list[str]:
    """What is to be said of caches of answers that frameworks imported here have on; they answer in the model's place.

    A program's caches, and those of agents that run in other processes, are not seen.
    """
    loaded = sys.modules if modules is None else modules
    return [words for name, (is_on, words) in _CACHES.items() if name in loaded and _read(is_on, loaded[name])]


def _read(is_on: Callable[[Any], bool], module: ModuleType) -> bool:
    """Whether it is on, as far as this version of the framework tells; while it is imported it may lack a part."""
    try:
        return is_on(module)
    except (AttributeError, TypeError):
        return False
