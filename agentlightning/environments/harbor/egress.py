"""Which hosts a box reaches, and the proxy that lets it reach no others.

A box whose task restricts its network has none of its own. What it reaches is reached through this proxy, for HTTP and
HTTPS: a request for an absolute URL, or CONNECT. Which hosts that may be changes with the phase of an attempt. This
machine's own loopback is never reached through it, nor is a link's own address, at which clouds give out keys.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from agentlightning.files import reason_of_file
from agentlightning.litagent.bubblewrap import Passage

Network = Literal["public", "no-network", "allowlist"]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
PORT = 3128
"""Where a box finds the proxy, on its own loopback; the next one where its model is there."""
_SECONDS = 30.0
"""For a request's head, and for the connection to its host."""
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """What is reached in one phase of an attempt."""

    mode: Network = "public"
    hosts: tuple[str, ...] = ()
    """With "allowlist": names, `*.` and a name for all below it, addresses, and ranges of addresses."""

    def names(self, host: str) -> bool:
        """Whether a host may be reached by the name or the address that was asked for."""
        if self.mode != "allowlist":
            return self.mode == "public"
        host = host.lower().rstrip(".")
        if (address := _address(host)) is not None:
            return self.holds(address)
        return any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in self.hosts)

    def holds(self, address: Address) -> bool:
        """Whether an address is one that is listed, or in a range that is."""
        ranges = (ipaddress.ip_network(one) for one in self.hosts if _is_range(one))
        return self.mode == "public" or any(address in one for one in ranges)


def checked_host(host: str) -> str:
    """An entry of allowed_hosts as it is compared. Raises ValueError for what is none: a URL, a port, a path."""
    name = host.strip().lower().rstrip(".")
    if _is_range(name):
        return name
    labels = name.removeprefix("*.").split(".")
    if not all(map(_LABEL.fullmatch, labels)) or (name.startswith("*.") and labels[-1].isdigit()):
        raise ValueError(
            f"{host!r} is no name of a host, such as example.org or *.example.org, and no address or range of addresses"
        )
    return name


def _is_range(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def _address(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


class Egress(Passage):
    """Passes on what one box asks of the hosts that it may reach."""

    def __init__(self, policy: NetworkPolicy) -> None:
        super().__init__("", 0)
        self.first = self.policy = policy
        self._to: dict[asyncio.StreamWriter, tuple[str, Address]] = {}

    @contextmanager
    def during(self, policy: NetworkPolicy) -> Iterator[None]:
        """Keep to a phase's policy. Connections to hosts that it leaves out end, and so they do afterwards."""
        before = self.policy
        try:
            self._keep_to(policy)
            yield
        finally:
            self._keep_to(before)

    def _keep_to(self, policy: NetworkPolicy) -> None:
        self.policy = policy
        for writer, (host, address) in list(self._to.items()):
            if not (policy.names(host) or policy.holds(address)):
                writer.close()

    async def reached(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The host that is asked for. Raises OSError where there is none; the box has been told why."""
        try:
            async with asyncio.timeout(_SECONDS):
                method, host, port, head = _request(await reader.readuntil(b"\r\n\r\n"))
                address = await self._allowed(host, port)
                there = await asyncio.open_connection(str(address), port)
        except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await _refuse(writer, "400 Bad Request", "This is a proxy for HTTP and HTTPS.")
        except PermissionError as error:
            await _refuse(writer, "403 Forbidden", str(error))
        except (OSError, TimeoutError) as error:
            await _refuse(
                writer,
                "502 Bad Gateway",
                f"The host cannot be reached: {reason_of_file(error) or 'no answer in time'}.",
            )
        else:
            self._to = {one: to for one, to in self._to.items() if not one.is_closing()} | {there[1]: (host, address)}
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                there[1].write(head)
            return there
        raise ConnectionRefusedError("The box was told why.")

    async def _allowed(self, host: str, port: int) -> Address:
        """The address at which a host is reached. Raises PermissionError where it may not be."""
        named = self.policy.names(host)
        if not named and (_address(host) is not None or not any(map(_is_range, self.policy.hosts))):
            raise PermissionError(_not_allowed(host, self.policy))
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            if named:
                raise
            found = []
        addresses = [address for *_, place in found if (address := _address(str(place[0]).partition("%")[0]))]
        for address in addresses:
            if not _is_ours(address) and (named or self.policy.holds(address)):
                return address
        if named:
            raise PermissionError(f"{host} is an address of the machine that runs this box, which is not reached.")
        raise PermissionError(_not_allowed(host, self.policy))


def _not_allowed(host: str, policy: NetworkPolicy) -> str:
    listed = f" It may reach {', '.join(policy.hosts)}." if policy.hosts else ""
    return f"This task's network_mode is {policy.mode}, and {host} is not reached.{listed}"


def _is_ours(address: Address) -> bool:
    return address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast


def _request(head: bytes) -> tuple[str, str, int, bytes]:
    """The method of a request, the host and the port that it is for, and what that host is sent of it. Raises
    ValueError for what is none."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, version = first.split(" ")
    url = urlsplit(f"//{target}" if method == "CONNECT" else target)
    if not url.hostname or (method != "CONNECT" and url.scheme != "http"):
        raise ValueError(f"{target} is no address of a host")
    kept = [line for line in lines if not line.lower().startswith(("proxy-", "host:", "connection:", "keep-alive:"))]
    path = url._replace(scheme="", netloc="").geturl() or "/"
    # One request a connection: the next may be for another host.
    sent = [f"{method} {path} {version}", f"Host: {url.netloc.rpartition('@')[2]}", *kept, "Connection: close"]
    port = url.port or (443 if method == "CONNECT" else 80)
    return method, url.hostname, port, "\r\n".join([*sent, "", ""]).encode("latin-1")


async def _refuse(writer: asyncio.StreamWriter, status: str, why: str) -> None:
    body = f"{why}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


def proxy_variables(port: int) -> dict[str, str]:
    """The variables by which programs find the proxy."""
    url = f"http://127.0.0.1:{port}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    own = "localhost,127.0.0.1,::1"
    return {**dict.fromkeys(names, url), "NO_PROXY": own, "no_proxy": own, "NODE_USE_ENV_PROXY": "1"}


def restricted(network_policies: Sequence[NetworkPolicy]) -> bool:
    """Whether a box with these phases has no network of its own."""
    return any(policy.mode != "public" for policy in network_policies)


def needs_proxy(network_policies: Sequence[NetworkPolicy]) -> bool:
    """Whether a box without a network of its own has a phase in which it reaches something."""
    return restricted(network_policies) and any(policy.mode != "no-network" for policy in network_policies)
