"""An engine that says what a function tells it to, in the tokens of a real tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import numpy as np

from agentlightning.engine.base import Chunk, EngineInfo, PromptLogprobs, SamplingParams
from agentlightning.rendering import RenderersRendering
from agentlightning.types.arrays import kept_array
from agentlightning.types.call import Float32Array, Int32Array

Script = Callable[[str, SamplingParams], str]
"""From the prompt's text and the settings to the response's text, without the end-of-turn token."""


class ScriptedEngine:
    """Implements the engine's seam. Every token has its own log-prob, so that a mix-up shows."""

    def __init__(self, rendering: RenderersRendering, script: Script, *, max_context: int = 4096) -> None:
        self.rendering = rendering
        self.script = script
        self.max_context = max_context
        self.version = 0
        self.delay = 0.0
        """Seconds per token when streaming, per response when not."""
        self.sampled: dict[str, tuple[Int32Array, Int32Array, Float32Array]] = {}
        """By request id: prompt ids, response ids, plain log-probs."""
        self.params: list[SamplingParams] = []
        self.running = 0
        self.aborted: list[str] = []
        self.fail: Exception | None = None
        self.scores_prompts = True
        self.open = asyncio.Event()
        """Cleared while weights change: requests that come then wait, those in flight finish."""
        self.open.set()

    async def info(self) -> EngineInfo:
        return EngineInfo(
            model="scripted",
            max_context=self.max_context,
            max_concurrency=64,
            vocab_size=1000,
            eos_ids=self.rendering.stop_token_ids,
            version=self.version,
            scores_prompts=self.scores_prompts,
        )

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        name = request_id or f"request-{len(self.params)}"
        self.params.append(params)
        await self.open.wait()
        if self.fail is not None:
            raise self.fail
        ids, reason, stop = self._respond(prompt_ids, params)
        logprobs = (-np.arange(1, len(ids) + 1) / 64 - len(self.params)).astype(np.float32)
        half: Float32Array = (logprobs / 2).astype(np.float32)
        self.running += 1
        try:
            step = 1 if stream else max(1, len(ids))
            for at in range(0, len(ids), step):
                await asyncio.sleep(self.delay)
                last = at + step >= len(ids)
                part = slice(at, at + step)
                yield Chunk(
                    ids=ids[part],
                    logprobs=half[part],
                    plain_logprobs=logprobs[part],
                    version=self.version,
                    top_ids=np.repeat(ids[part, None], params.top_logprobs, axis=1) if params.top_logprobs else None,
                    top_logprobs=np.repeat(logprobs[part, None], params.top_logprobs, axis=1).astype(np.float32)
                    if params.top_logprobs
                    else None,
                    kept=kept_array([[token] for token in ids[part].tolist()]) if params.keeps else None,
                    finish_reason=reason if last else None,
                    stop_string=stop if last else None,
                    prompt=_scored(prompt_ids, params) if last else None,
                )
                if last:
                    self.sampled[name] = (prompt_ids, ids, logprobs)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(name)
            raise
        finally:
            self.running -= 1

    def _respond(self, prompt_ids: Int32Array, params: SamplingParams) -> tuple[Int32Array, str, str | None]:
        text = self.script(self.rendering.decode(prompt_ids), params)
        for stop in params.stop:
            if stop in text:
                cut = text[: text.index(stop) + len(stop)]
                return self.rendering.encode(cut), "stop", stop
        ids = self.rendering.encode(text)
        for at, token in enumerate(ids.tolist()):
            if token in params.stop_token_ids:
                return ids[: at + 1], "stop", None
        if params.max_tokens is not None and len(ids) >= params.max_tokens:
            return ids[: params.max_tokens], "length", None
        return np.append(ids, np.int32(self.rendering.stop_token_ids[0])), "stop", None


def _scored(prompt_ids: Int32Array, params: SamplingParams) -> PromptLogprobs | None:
    """Log-probs of a prompt's tokens that tell its places: -1, -2, …; the k-th alternative is token k, at -k."""
    top, later = params.prompt_logprobs, len(prompt_ids) - 1
    if top is None or not later:
        return None
    ranks = np.arange(1, top + 1)
    return PromptLogprobs(
        logprobs=-np.arange(1, later + 1).astype(np.float32),
        top_ids=np.tile(ranks, (later, 1)).astype(np.int32) if top else None,
        top_logprobs=np.tile(-ranks, (later, 1)).astype(np.float32) if top else None,
    )
