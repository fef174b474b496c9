"""What keeps web pages of others away from our servers: in front of every one of them, for every path.

A browser sends requests to whatever address a page names, a loopback address included. Three things tell them from
those of our clients: the name that they ask for (a page's own name may be made to lead to this machine, DNS rebinding),
the page that they come from, and the type of their body, which a page of another site chooses from three without being
asked first: a form, plain text, or none at all. So `Host` must be a name of this server, `Origin` the same name and
port, and a body of a type that only programs send. No answer depends on a key here; keys are checked behind it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.errors import ConfigError

ALLOW_HOSTS = "AGL_ALLOW_HOSTS"
"""The environment variable that names more hosts, separated by commas, for all servers of a process."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")
_ALLOWED = re.compile(r"\.?[a-z0-9][a-z0-9._-]*|[0-9a-f:.]+")
_BODY_TYPES = re.compile(
    rb"application/(?:[\w.+-]+\+)?json|application/x-protobuf|application/(?:vnd\.|x-)?msgpack", re.IGNORECASE
)
_FORM = b"multipart/form-data"
_NO_KEY = "A form is taken with a key, any where none is wanted: send Authorization: Bearer KEY."
_PLAIN = b"identity"
_COMPRESSIBLE = "/v1/traces"
"""Where exporters of OpenTelemetry send spans, which they compress."""
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
_NAVIGATES = b"navigate"
_KNOWN_HOSTS = 256


def is_local_name(host: str) -> bool:
    """Whether this name of a server means this machine, whoever resolves it."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def check_allowed_hosts(names: Iterable[str]) -> tuple[str, ...]:
    """The names in one form; one with a dot in front stands for all below it too. Raises ConfigError for others."""
    found = tuple(name.strip().lower().rstrip(".") for name in names)
    for name in found:
        if _ALLOWED.fullmatch(name) is None:
            raise ConfigError(
                f"An allowed host is {name!r}; give a host's name alone, as store.example.com, or .example.com for all "
                "below it (--allow-host, AGL_ALLOW_HOSTS)."
            )
    return found


class Guard:
    """The ASGI application behind it, for requests that name a host of this server.

    `host` is the address that the server listens on. On loopback the names of loopback are its own. On other addresses,
    where every server wants a key, they are all addresses, which no DNS can lead elsewhere, this machine's names and
    names without a dot, which nobody can register. `allowed` names others, and so does the environment. With `forms` a
    multipart form is a body, too, in a request with a key in its header: no page can send one of another site without
    asking first.
    """

    def __init__(self, app: ASGIApp, host: str, allowed: Sequence[str] = (), *, forms: bool = False) -> None:
        self._app = app
        self._forms = forms
        self._loopback = is_local_name(host)
        environment = [name for name in os.environ.get(ALLOW_HOSTS, "").split(",") if name.strip()]
        self._allowed = check_allowed_hosts([*allowed, *environment])
        self._below = tuple(name for name in self._allowed if name.startswith("."))
        self._own = {host.lower()}
        if not self._loopback:
            self._own |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        self._is_own: Callable[[bytes], bool] = lru_cache(_KNOWN_HOSTS)(self._names_this)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await _refuse(send, *refusal)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason of a request that is refused; None for one that is not."""
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name == b"host" and not self._is_own(value):
                return 403, _not_ours(value)
            headers[name] = value if name not in headers else headers[name] + b", " + value  # one that stands twice
        if (foreign := self._foreign(headers)) is not None:
            return 403, foreign
        if scope.get("method") not in _WITHOUT_BODY and _has_body(headers):
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip()
            is_form = self._forms and kind.lower() == _FORM and b"authorization" in headers
            if not is_form and _BODY_TYPES.fullmatch(kind) is None:
                of_forms = _NO_KEY if self._forms else NO_FILES
                return 415, of_forms if kind.lower() == _FORM else _wrong_type(kind)
            encoding = headers.get(b"content-encoding", _PLAIN).strip().lower()
            if encoding not in (b"", _PLAIN) and not scope["path"].endswith(_COMPRESSIBLE):
                return 415, f"The body is compressed ({_shown(encoding)}). Send it as it is, without Content-Encoding."
        return None

    def _foreign(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Why a request comes from a page of another site."""
        origin = headers.get(b"origin")
        if origin is not None and not self._is_same(origin, headers.get(b"host", b"")):
            return (
                f"A page of {_shown(origin)} may not use this server. If it is yours, start the server with "
                f"--allow-host and the name of its host ({ALLOW_HOSTS} in the environment)."
            )
        site, mode = headers.get(b"sec-fetch-site"), headers.get(b"sec-fetch-mode")
        if origin is None and site in (b"cross-site", b"same-site") and mode != _NAVIGATES:
            return "A page of another site may not use this server; open it by its own address."
        return None

    def _is_same(self, origin: bytes, host: bytes) -> bool:
        where = origin.partition(b"://")[2].lower()
        return (where != b"" and where == host.lower()) or self._is_allowed(_name_of(where))

    def _is_allowed(self, name: str | None) -> bool:
        return name is not None and (name in self._allowed or f".{name}" in self._below or name.endswith(self._below))

    def _names_this(self, host: bytes) -> bool:
        """Whether a `Host` means this server, on whatever port: tunnels and containers have others."""
        name = _name_of(host)
        if name is None:
            return False
        if name in self._own or is_local_name(name) or self._is_allowed(name):
            return True
        return not self._loopback and ("." not in name or _address(name) is not None)


def _name_of(host: bytes) -> str | None:
    """The name in `name:port`, without the brackets of an IPv6 address; None if it is neither."""
    found = _HOST.fullmatch(host.decode("latin-1").lower())
    return None if found is None else found[1].strip("[]").rstrip(".")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _has_body(headers: Mapping[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0 ") != b""


def _shown(given: bytes) -> str:
    return repr(given[:100].decode("latin-1"))


def _not_ours(host: bytes) -> str:
    return (
        f"The host {_shown(host)} is no name of this server. If it leads here, start the server with --allow-host and "
        f"that name ({ALLOW_HOSTS} in the environment)."
    )


NO_FILES = "This server takes no files. Those to fine-tune on go to another one:  agl serve MODEL --training FOLDER"


def _wrong_type(kind: bytes) -> str:
    given = _shown(kind) if kind else "no type"
    return (
        f"The body has {given}. Send JSON as such: Content-Type: application/json "
        "(curl: -H 'Content-Type: application/json')."
    )


async def _refuse(send: Send, status: int, reason: str) -> None:
    """Answer in the forms of all our servers at once: OpenAI's errors, and problem details."""
    error: dict[str, Any] = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
    body = msgspec.json.encode({"status": status, "detail": reason, "error": error})
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
