"""An engine that says what a good agent would say, for frameworks whose prompts the tiny model never learnt to read.

It sees tokens and samples tokens, like any other: what it says depends on the prompt alone, and the log-probs are made
up and different each time, so that nothing but exact capture can reproduce them.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np

from agentlightning.engine.base import Chunk, Engine, EngineInfo, SamplingParams
from agentlightning.types.call import Int32Array
from tests.clients.tool import calc

MAX_CONTEXT = 32_768
QUESTION = re.compile(r"What is (\d+) ([-+*/]) (\d+)\?")


class ScriptedEngine:
    """Calls `calc` with the question, then answers with its result: in words, or with the tool `final_answer`."""

    def __init__(self, engine: Engine, tokenizer: Any, end: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._end = end
        self._random = np.random.default_rng(0)

    async def info(self) -> EngineInfo:
        return msgspec.structs.replace(await self._engine.info(), max_context=MAX_CONTEXT)

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        prompt = self._tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
        text = _rest(prompt, _say(prompt))
        ids = np.array([*self._tokenizer.encode(text, add_special_tokens=False), self._end], dtype=np.int32)
        logprobs = -self._random.random(len(ids), dtype=np.float32)
        parts = np.array_split(np.arange(len(ids)), min(len(ids), 5)) if stream else [np.arange(len(ids))]
        for number, part in enumerate(parts):
            yield Chunk(
                ids=ids[part],
                logprobs=logprobs[part],
                plain_logprobs=logprobs[part],
                version=0,
                finish_reason="stop" if number == len(parts) - 1 else None,
            )


def _say(prompt: str) -> str:
    a, op, b = QUESTION.findall(prompt)[-1]
    asked = prompt.rindex("What is ")
    result = calc(float(a), op, float(b))
    if "[[ ## " in prompt:
        return _fields(prompt[asked:], {"a": int(a), "op": op, "b": int(b)}, result)
    if "calc" not in prompt[asked:]:
        return _call("calc", {"a": int(a), "op": op, "b": int(b)})
    if "final_answer" in prompt:
        return _call("final_answer", {"answer": result})
    return f"The answer is {result}."


def _fields(asked: str, arguments: dict[str, Any], result: str) -> str:
    """The same in DSPy's way of writing: fields in the text."""
    if "`[[ ## answer ## ]]`" in asked:
        said = {"reasoning": "As calculated.", "answer": result}
    elif "observation_0" in asked:
        said = {"next_thought": "Known.", "next_tool_name": "finish", "next_tool_args": "{}"}
    else:
        said = {"next_thought": "Calculate.", "next_tool_name": "calc", "next_tool_args": json.dumps(arguments)}
    return "\n\n".join([*(f"[[ ## {name} ## ]]\n{text}" for name, text in said.items()), "[[ ## completed ## ]]"])


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _rest(prompt: str, text: str) -> str:
    """What is left to say where the prompt already ends with the beginning of it."""
    said = next(n for n in range(len(text), -1, -1) if prompt.endswith(text[:n]))
    return text[said:]
