"""Sampling settings: what the agent asked, what the run overrides, what is used. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentlightning.engine.base import SamplingParams
from agentlightning.errors import ConfigError
from agentlightning.gateway.exchange import Refusal
from agentlightning.types import RolloutMode

PENALTIES = ("presence_penalty", "frequency_penalty")
SETTINGS = ("temperature", "top_p", "top_k", "min_p", *PENALTIES, "logit_bias", "max_tokens", "stop", "seed")
"""Sampling settings by their neutral names, as in `CallRequest.asked` and `CallInfo.used`."""


MAX_BIASES = 300
"""Tokens of a request's `logit_bias`, which is kept with every choice; the engines take no more."""
MAX_STOP_IDS = 128
_COLDEST = 1e-5
"""A temperature below it is meant as 0; log-probs divided by it would mean nothing any more."""


@dataclass(frozen=True)
class Overrides:
    """Settings that win over the agent's own."""

    train: Mapping[str, Any] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)
    """In validation and test."""


def check_overrides(where: str, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The overrides, if they are ones; an unknown name is a `ConfigError`."""
    found = dict(overrides or {})
    unknown = sorted(set(found) - set(SETTINGS))
    if unknown:
        raise ConfigError(f"Unknown sampling settings in {where}: {unknown}. Known are {list(SETTINGS)}.")
    found = {name: value for name, value in found.items() if value is not None}
    try:
        check_settings(found)
        _within(found, "max_tokens", 1, 2**31 - 1)
    except Refusal as refusal:
        raise ConfigError(f"{where}: {refusal.message}") from None
    return found


def settle(
    settings: Mapping[str, Any],
    overrides: Overrides,
    mode: RolloutMode | None,
    rollout_id: str,
    number: int,
    *,
    sampling_seed: int | None = None,
) -> dict[str, Any]:
    """The settings to use for call `number` of a rollout, of which the first choice takes the seed as it is.

    The run's overrides win. In train mode, where siblings must differ, an agent's seed is mixed with the rollout and
    the call. `sampling_seed` is the rollout's own (see `types.rollout.SAMPLING_SEED`), for calls that bring none.
    """
    train = mode is RolloutMode.TRAIN
    used = {**settings, **(overrides.train if train else overrides.other)}
    if used.get("seed") is None and sampling_seed is not None:
        used["seed"] = mix(sampling_seed, number)
    elif train and used.get("seed") is not None:
        used["seed"] = mix(used["seed"], rollout_id, number)
    if 0 < used.get("temperature", 1.0) < _COLDEST:
        used["temperature"] = 0.0
    if used.get("top_k", 0) < 0:
        used["top_k"] = 0
    return used


def params_for(
    used: Mapping[str, Any], *, choice: int, most_tokens: int, top_logprobs: int, grammar: str | None = None
) -> SamplingParams:
    """The engine's parameters for one choice; `most_tokens` is what the context leaves for the response.

    Engines sample one token at least, also where none is wanted.
    """
    wanted_tokens = used.get("max_tokens")
    most = most_tokens if wanted_tokens is None else min(max(1, int(wanted_tokens)), most_tokens)
    seed = used.get("seed")
    return SamplingParams(
        temperature=float(used.get("temperature", 1.0)),
        top_p=float(used.get("top_p", 1.0)),
        top_k=int(used.get("top_k", 0)),
        min_p=float(used.get("min_p", 0.0)),
        presence_penalty=float(used.get("presence_penalty", 0.0)),
        frequency_penalty=float(used.get("frequency_penalty", 0.0)),
        logit_bias={int(token): float(bias) for token, bias in used.get("logit_bias", {}).items() if bias is not None},
        min_tokens=min(int(used.get("min_tokens", 0)), most),
        ignore_eos=bool(used.get("ignore_eos", False)),
        max_tokens=most,
        stop=tuple(used.get("stop", ())),
        stop_token_ids=tuple(used.get("stop_token_ids", ())),
        seed=None if seed is None else (int(seed) + choice) % 2**63,
        top_logprobs=top_logprobs,
        grammar=grammar,
    )


def samples_nothing(used: Mapping[str, Any]) -> bool:
    """Whether a request wants no response, only information on its prompt."""
    return used.get("max_tokens") == 0


def cut_off_by(finish_reason: str, used: Mapping[str, Any], tokens: int) -> str | None:
    """The limit of the run that cut a response off after so many tokens; None where it ended, or where the request (or
    a setting) wanted no more tokens in one answer.
    """
    wanted = used.get("max_tokens")
    if finish_reason != "length" or (wanted is not None and tokens >= int(wanted)):
        return None
    return f"A response was cut off after {tokens} tokens, where the context or the rollout's tokens were used up."


def mix(*parts: int | str) -> int:
    """A seed that differs where one of the parts does, and is the same when the same run is repeated."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse values that no engine takes, naming the field."""
    _within(settings, "temperature", 0.0, 10.0)
    _within(settings, "top_p", 0.0, 1.0, open_below=True)
    _within(settings, "min_p", 0.0, 1.0)
    _within(settings, "top_k", -1, 2**31 - 1)
    for name in PENALTIES:
        _within(settings, name, -2.0, 2.0)
    _check_bias(settings.get("logit_bias", {}))
    _check_stop_ids(settings.get("stop_token_ids", []))
    _within(settings, "max_tokens", 0, 2**31 - 1)
    _within(settings, "min_tokens", 0, 2**31 - 1)
    if not isinstance(settings.get("ignore_eos", False), bool):
        raise Refusal("'ignore_eos' must be true or false.", code="invalid_type", param="ignore_eos")
    _within(settings, "seed", -(2**63), 2**63 - 1)
    for name in ("top_k", "max_tokens", "min_tokens", "seed"):
        if isinstance(settings.get(name), float):
            raise Refusal(f"'{name}' must be a whole number, not {settings[name]!r}.", code="invalid_type", param=name)


def _check_stop_ids(ids: Any) -> None:
    if not isinstance(ids, list | tuple) or len(ids) > MAX_STOP_IDS or not all(_is_token(token) for token in ids):
        raise Refusal(
            f"'stop_token_ids' must be a list of at most {MAX_STOP_IDS} token ids.",
            code="invalid_type",
            param="stop_token_ids",
        )


_TOKEN = re.compile(r"\d{1,10}", re.ASCII)


def _is_token(token: Any) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31


def _check_bias(bias: Any) -> None:
    """A bias by token id, which JSON writes as text."""
    if not isinstance(bias, Mapping) or not all(_TOKEN.fullmatch(str(token)) for token in bias):
        raise Refusal(
            "'logit_bias' must be an object of token ids with a number each.", code="invalid_type", param="logit_bias"
        )
    if len(bias) > MAX_BIASES:
        raise Refusal(
            f"'logit_bias' may hold {MAX_BIASES} tokens, not {len(bias)}.", code="invalid_value", param="logit_bias"
        )
    for token, value in bias.items():
        _within({f"logit_bias.{token}": value}, f"logit_bias.{token}", -100.0, 100.0)


def _within(settings: Mapping[str, Any], name: str, low: float, high: float, *, open_below: bool = False) -> None:
    value = settings.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refusal(f"'{name}' must be a number, not {value!r}.", code="invalid_type", param=name)
    if value > high or value < low or (open_below and value == low):
        raise Refusal(f"'{name}' must be between {low} and {high}, not {value!r}.", code="invalid_value", param=name)
