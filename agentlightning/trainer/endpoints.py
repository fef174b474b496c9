"""The endpoints among a run's initial resources: agents ask them through the gateway, which records the calls.

An `LLM` that is given by the user becomes a provider of the gateway under its own model's name, and the resource that
agents get in its place is the gateway's. The provider's key stays here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from agentlightning.algorithm.base import PolicySpec
from agentlightning.backend import POLICY
from agentlightning.errors import ConfigError
from agentlightning.gateway import Provider
from agentlightning.trainer.checks import is_endpoint
from agentlightning.trainer.serving import ServedModels
from agentlightning.types import LLM, NamedResources, Resource

POLICY_NAMES = ("llm", "main_llm")
"""What agents call the trained policy's endpoint."""
MOST_CALLS = 1024
"""At the same time, at one endpoint: whoever gave it set no limit."""
SHADOWED = (
    "initial_resources has {name!r}, which is what agents call the model that is trained: the one you gave is left "
    "out. Give another endpoint another name."
)


@dataclass(frozen=True, slots=True)
class GivenEndpoints:
    """What became of the initial resources of one run."""

    providers: Mapping[str, Provider]
    """By the alias that requests name as their model."""
    endpoints: Mapping[str, tuple[str, LLM]]
    """The alias of each resource that is an endpoint, and what was given, by the resource's name."""
    left_out: Collection[str]
    """The names of endpoints that the policy's own has."""

    def resources(self, given: NamedResources, served: ServedModels) -> NamedResources:
        """What agents get: the endpoints of what is served, and what was given, by name."""
        own = {name: resource for name, resource in served.resources().items() if name not in self.providers}
        if served.backend is None and served.aliases[0] in self.providers:
            own.pop("llm", None)  # the first of what is served, whatever its name; here each has its own
        found = {name: resource for name, resource in given.items() if name not in self.left_out}
        for name, (alias, llm) in self.endpoints.items():
            found[name] = served.gateway.as_resource(alias, sampling_parameters=llm.sampling_parameters)
        return {**own, **found}


def given_endpoints(
    given: Mapping[str, Resource], models: Collection[str], policy: PolicySpec | None
) -> GivenEndpoints:
    """Which of the `given` resources are endpoints that the gateway is to stand in front of, beside its `models`.

    An endpoint is known by its model's name, as programs that name the model themselves expect; where that means
    something else already, by the resource's name.
    """
    taken = {POLICY, *models}
    if policy is not None:
        own = policy.model
        taken |= {own.model, *own.trained, *own.members, own.frozen or POLICY, *POLICY_NAMES}
    providers: dict[str, Provider] = {}
    endpoints: dict[str, tuple[str, LLM]] = {}
    left_out: list[str] = []
    for name, resource in given.items():
        if not is_endpoint(resource):
            continue
        if policy is not None and name in POLICY_NAMES:
            left_out.append(name)
            continue
        provider = _provider(name, resource)
        names = itertools.chain((resource.model, name), (f"{name}-{number}" for number in itertools.count(2)))
        alias = next(n for n in names if n and n not in taken and providers.get(n, provider) == provider)
        endpoints[name] = (alias, resource)
        providers[alias] = provider
    return GivenEndpoints(providers, endpoints, left_out)


def _provider(name: str, llm: LLM) -> Provider:
    try:
        return Provider(
            base_url=llm.endpoint,
            api_key=llm.api_key or None,
            forward_client_key=True,
            model=llm.model or None,
            max_concurrency=MOST_CALLS,
        )
    except ConfigError as error:
        raise ConfigError(f"initial_resources has {name!r}, an LLM that nobody can ask. {error}") from None
