"""The texts that pages show: tokens decoded by the tokenizer of a run's model, the places where calls left a known
history, and answers as JSON that every browser reads (numbers that are not finite become null, long texts are cut, keys
are not shown).
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel

from agentlightning.algorithm.episode import Episode
from agentlightning.doctor import find_breaks
from agentlightning.errors import ModelError
from agentlightning.keys import redacted, redacted_pieces
from agentlightning.models import resolve_model
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Call, Rollout


class Texts:
    """The text of each token by itself; what is only a part of a character is shown as such."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode = functools.lru_cache(maxsize=65_536)(lambda token: tokenizer.decode([token]))

    def whole(self, ids: Sequence[int]) -> str:
        """The text of all of them together."""
        return self._tokenizer.decode(list(ids))

    def __call__(self, ids: Sequence[int]) -> list[str]:
        return redacted_pieces([self._decode(token) for token in ids])


@functools.lru_cache(maxsize=8)
def _load(model: str) -> Texts | str:
    """The tokenizer of a model, or why there is none. Never fetched from the network."""
    from pathlib import Path

    try:
        place = resolve_model(model)
        if not Path(place).is_dir():
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(place, "tokenizer.json")
            if not isinstance(cached, str):
                return f"The tokenizer of {model} is not on this machine, so tokens are shown as numbers."
            place = str(Path(cached).parent)
        from agentlightning.rendering.tokenizer import FileTokenizer

        if not (Path(place) / "tokenizer.json").is_file():
            return f"{model} has no tokenizer.json, so tokens are shown as numbers."
        return Texts(FileTokenizer(Path(place), model))
    except ImportError:
        return "The training extra is not installed here, so tokens are shown as numbers."
    except (ModelError, OSError, ValueError) as error:
        return f"Tokens are shown as numbers: {error}"


async def texts_of(store: SqlLightningStore, run_id: str | None) -> tuple[Texts | None, str | None]:
    """The texts of a run's tokens; or None and why."""
    run = await store.get_run_by_id(run_id) if run_id else None
    model = run.settings.get("model") if run else None
    if not isinstance(model, str):
        return None, "It is not known which model these tokens are of, so they are shown as numbers."
    found = await asyncio.to_thread(_load, model)
    return (None, found) if isinstance(found, str) else (found, None)


def branches(rollout: Rollout, calls: Sequence[Call], texts: Texts | None) -> dict[str, dict[str, Any]]:
    """Calls that left a known history, by id: where, why, what differs first, and what to change."""
    divergences = {
        c.info.call_id: msgspec.to_builtins(c.info.divergence) for c in calls if c.info.divergence is not None
    }
    for one in find_breaks([Episode(rollout, None, None, calls)], None if texts is None else texts.whole):
        fields = {name: getattr(one, name) for name in ("position", "tokens_lost", "cause", "before", "was", "now")}
        divergences[one.call_id] = {**fields, "advice": one.advice}
    return divergences


_MOST_TEXT = 100_000
"""Characters of one text that a page is given; a text that is cut says so."""
_SECRET = re.compile(r"(api_?key|secret|password|authorization|access_?token)$", re.IGNORECASE)
_HIDDEN = "•••"


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return str(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain)


def as_json(value: Any) -> bytes:
    """NaN and infinity as null, and no attempt's key, whatever the field."""
    return redacted(_encoder.encode(value).decode()).encode()


def cut(text: str, most: int = _MOST_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def shown(value: Any, most: int = _MOST_TEXT) -> Any:
    """A value from a store for people to see: keys hidden, long texts cut, inside lists and dicts too."""
    if isinstance(value, str):
        return cut(redacted(value), most)
    if isinstance(value, Mapping):
        return {
            str(key): _HIDDEN if item and isinstance(item, str) and _SECRET.search(str(key)) else shown(item, most)
            for key, item in value.items()
        }
    return [shown(item, most) for item in value] if isinstance(value, list | tuple) else value
