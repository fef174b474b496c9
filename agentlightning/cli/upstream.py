"""`--upstream NAME=URL`: other providers behind the gateway, as the command line says them."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.errors import ConfigError
from agentlightning.gateway import Provider
from agentlightning.keys import not_empty


def read_upstreams(given: Sequence[str], key: str | None) -> dict[str, Provider]:
    """The providers by name, all with the same key. Raises ConfigError for a text that says no NAME=URL."""
    not_empty(key, "--upstream-key")
    return {name: Provider(base_url=url, api_key=key) for name, url in map(_named, given)}


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith(("http://", "https://"))):
        raise ConfigError(f"'{text}' does not say NAME=URL, for example --upstream gpt=https://api.example.com/v1.")
    return name, url
