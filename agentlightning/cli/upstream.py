"""`--upstream NAME=URL` and what goes with it: other providers behind the gateway, as the command line says them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from agentlightning.arguments import check_address
from agentlightning.cli.options import UpstreamOptions
from agentlightning.errors import ConfigError
from agentlightning.gateway import Provider, SpendingLimits, TokenPrice
from agentlightning.keys import not_empty

T = TypeVar("T")


def read_upstreams(options: UpstreamOptions) -> dict[str, Provider]:
    """The providers by name, all with the same key. Raises ConfigError for a text that does not say what it should, or
    is about a provider that is not given.
    """
    key = options.upstream_key
    not_empty(key, "--upstream-key")
    urls = dict(map(_named, options.upstream))
    priced = dict(_read("--upstream-price", text, _price, urls) for text in options.upstream_price)
    limited: dict[str, dict[str, float]] = {}
    for name, (limit, value) in (_read("--upstream-limit", text, _limit, urls) for text in options.upstream_limit):
        limited.setdefault(name, {})[limit] = value
    return {
        name: Provider(
            base_url=url,
            api_key=key,
            price=priced.get(name),
            limits=msgspec.convert(limited.get(name, {}), SpendingLimits, strict=False),
        )
        for name, url in urls.items()
    }


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if name and equals:
        check_address(f"The address of --upstream {name}", url)
    else:
        raise ConfigError(f"'{text}' does not say NAME=URL, for example --upstream gpt=https://api.example.com/v1.")
    return name, url


def _read(option: str, text: str, read: Callable[[str], tuple[str, T]], known: dict[str, str]) -> tuple[str, T]:
    try:
        name, value = read(text)
    except ValueError:
        limits = ", ".join(SpendingLimits.__struct_fields__)
        example = "judge=0.15,0.6" if option == "--upstream-price" else f"judge.run_cost=5; the limits are {limits}"
        raise ConfigError(f"{option} '{text}' cannot be read. An example: {option} {example}.") from None
    if name not in known:
        raise ConfigError(f"{option} '{text}' is about '{name}', which no --upstream {name}=URL gives.")
    return name, value


def _price(text: str) -> tuple[str, TokenPrice]:
    name, _, numbers = text.rpartition("=")
    return name, TokenPrice(**dict(zip(TokenPrice.__struct_fields__, map(float, numbers.split(",")), strict=False)))


def _limit(text: str) -> tuple[str, tuple[str, float]]:
    path, _, number = text.rpartition("=")
    name, _, limit = path.rpartition(".")
    if limit not in SpendingLimits.__struct_fields__:
        raise ValueError(limit)
    return name, (limit, float(number))
