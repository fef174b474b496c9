"""Where the runners are, and which part of the system this process is.

    inline      runners in this process, beside the gateway (the default)
    processes   n_runners processes on this machine
    ray         n_runners actors on a Ray cluster (the default with `backend="ray"`)
    remote      runners that join from elsewhere: `agl runner`, or the same script with AGL_CURRENT_ROLE=runner

The environment can say it too, so that one script runs everywhere unchanged: AGL_CURRENT_ROLE (both, algorithm,
runner), AGL_SERVER_HOST and AGL_SERVER_PORT of the store's server, AGL_STORE_KEY, and AGL_MANAGED_STORE=0 for a store
that is served by somebody else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from agentlightning.arguments import can_be
from agentlightning.dashboard import served_with_dashboard
from agentlightning.errors import ConfigError, VariableError
from agentlightning.keys import derived_secret, new_key
from agentlightning.runner.remote import Address
from agentlightning.store.base import LightningStore
from agentlightning.store.sql import SqlLightningStore

Runners = Literal["inline", "processes", "ray", "remote"]
Role = Literal["both", "algorithm", "runner"]
DEFAULT_PORT = 4747

YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")


def _says_yes(variable: str, text: str) -> bool:
    if text.lower() in (*YES, *NO):
        return text.lower() in YES
    raise VariableError(f"{variable} is '{text}'; it can be one of {', '.join([*YES, *NO])}.")


@dataclass(frozen=True, slots=True)
class Strategy:
    """What this process does."""

    role: Role
    runners: Runners
    host: str
    port: int
    key: str | None = field(repr=False)
    managed_store: bool = True
    n_runners: int | None = None
    """How many, where the strategy says it; None leaves it to the trainer."""

    @classmethod
    def read(
        cls, runners: str | None, environment: Mapping[str, str] = os.environ, *, default: Runners = "inline"
    ) -> Strategy:
        """`default` is for a trainer that runs agents itself. Raises ConfigError for what makes no sense."""
        role = (environment.get("AGL_CURRENT_ROLE") or "both").lower()
        if role not in get_args(Role):
            raise VariableError(f"AGL_CURRENT_ROLE is '{role}'; it can be both, algorithm or runner.")
        chosen = runners or (default if role == "both" else "remote")
        if chosen not in get_args(Runners):
            raise ConfigError(f"strategy is {chosen!r}; {can_be(chosen, get_args(Runners))}")
        if role != "both" and chosen != "remote":
            raise ConfigError(
                f"AGL_CURRENT_ROLE={role} means runners on other machines; leave strategy={chosen!r} out."
            )
        key = environment.get("AGL_STORE_KEY") or None
        managed = _says_yes("AGL_MANAGED_STORE", environment.get("AGL_MANAGED_STORE") or "1")
        if chosen == "remote" and not key:
            raise ConfigError(
                "Runners on other machines need a key to the store. Set the same AGL_STORE_KEY for them and for the "
                "trainer, for example to the output of: openssl rand -hex 32"
            )
        try:
            port = int(environment.get("AGL_SERVER_PORT") or DEFAULT_PORT)
        except ValueError:
            raise VariableError(f"AGL_SERVER_PORT is '{environment['AGL_SERVER_PORT']}', which is no number.") from None
        host = environment.get("AGL_SERVER_HOST") or "127.0.0.1"
        return cls(role, chosen, host, port, key, managed)  # pyright: ignore[reportArgumentType]

    @property
    def runs_no_agent(self) -> bool:
        """Whether this process decides, and runs no agent itself."""
        return self.runners == "remote" and self.role != "runner"

    @property
    def runs_here(self) -> bool:
        """Whether rollouts run on this machine, and no runner elsewhere takes them."""
        return self.runners in ("inline", "processes")

    @property
    def gateway_host(self) -> str:
        """The address for the gateway to listen on: where runners elsewhere reach the store."""
        return self.host if self.runners in ("ray", "remote") else "127.0.0.1"

    @property
    def address(self) -> Address:
        """Of the store's server, for a runner."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return Address(f"http://{host}:{self.port}", self.key)

    def with_key(self) -> Strategy:
        """Runners that the trainer starts get a key that is made for this run."""
        if self.runners not in ("processes", "ray"):
            return self
        return replace(self, host="127.0.0.1", port=0, key=new_key())

    def at(self, host: str) -> Strategy:
        """With this machine's address on the cluster that runners reach it from."""
        return replace(self, host=host) if self.runners == "ray" else self

    @property
    def secret(self) -> bytes | None:
        """Signs the keys of attempts; None leaves it to the gateway."""
        return derived_secret(self.key) if self.key and self.runners != "inline" else None

    async def serve(self, stack: AsyncExitStack, store: LightningStore) -> Address | None:
        """Serve the store to the runners, if they are not here; `stack` ends it."""
        if self.runners == "inline" or not self.managed_store:
            return None
        if not isinstance(store, SqlLightningStore):
            raise ConfigError(
                f"The trainer cannot serve a {type(store).__name__} to runners. Set AGL_MANAGED_STORE=0 if it is "
                "served already, or leave store= out."
            )
        server = served_with_dashboard(store, self.host, self.port, admin_key=self.key, secret=self.secret)
        await server.start()
        stack.push_async_callback(server.stop)
        return Address(server.endpoint, self.key)
