"""Attempt-scoped API keys: what an agent holds opens its own attempt and nothing else.

A key carries the rollout, the attempt and what it may do in clear text, and an HMAC over them; whoever knows the secret
can check a key without looking anything up. Keys do not expire: an attempt that is finished refuses them by its status.

The same in a URL that names the rollout and the attempt itself is a *URL key*: `…/attempt/{id}/key/{scopes}-{HMAC}/v1`.
`redacted` takes both kinds out of texts that people read.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from agentlightning.errors import ConfigError

PREFIX = "agl-"
_SIGNATURE_BYTES = 24


class AttemptKey(msgspec.Struct, frozen=True, array_like=True):
    """What a valid key says: whose it is and what it may do."""

    rollout_id: str
    attempt_id: str
    scopes: tuple[str, ...]


CALLS = "calls"
"""May call models through the gateway."""
SPANS = "spans"
"""May report spans of the attempt to the store."""
TASK = "task"
"""May read the rollout's task from the store."""
REWARDS = "rewards"
"""May write rewards among its spans; withheld when a grader gives them."""
CLOSE = "close"
"""May close the attempt at the gateway; for its runner, never given to an agent."""
ALL_SCOPES = (CALLS, SPANS, TASK, REWARDS)

SECRET = "The secret that attempts' keys are signed with"
_LETTERS = {CALLS: "c", SPANS: "s", TASK: "t", REWARDS: "r", CLOSE: "x"}
_SCOPES = {letter: scope for scope, letter in _LETTERS.items()}
_SLASH = r"(?:\\*/|%2[fF])"
_SECRETS = re.compile(
    rf"({_SLASH}key{_SLASH}[{''.join(_SCOPES)}]*-[\w-]{{3}})[\w-]{{13,}}"
    rf"|({PREFIX}(?=[\w-]{{0,31}}[A-Z])[\w-]{{3}})[\w-]{{29,}}"
)
"""Keys of both kinds, whatever stands in front: in JSON text a line ends with the letters of its escape. A key that was
cut is one too, as long as its signature is whole: what follows it is known. A signature has capitals, a name has none.
"""


_Key = TypeVar("_Key", str, bytes)


_PLACEHOLDER = re.compile(r"\$\{?\w+\}?|[A-Z]+(_[A-Z]+)*_(KEY|TOKEN)|(sk-)?\.{3,}|(sk-)?…|<[^<>]*>|(?i:your)[-_ ].*")
"""What examples have in the place of a key, and the names of variables."""


def not_empty(key: _Key | None, what: str) -> _Key | None:
    """The key or secret. Raises ConfigError for an empty one, as a variable that is not set gives: it would keep nobody
    out, and everybody could sign with it. Nor may one have what belongs around it: blanks, a line's end, "Bearer".
    """
    if isinstance(key, str) and key.strip() and (key != key.strip() or key.startswith("Bearer ")):
        raise ConfigError(
            f"{what} has blanks, a line's end or 'Bearer' around it. Give the key alone; from a file, take .strip()."
        )
    if isinstance(key, str) and _PLACEHOLDER.fullmatch(key):
        raise ConfigError(f"{what} is a placeholder, not a key. To read it from a variable, write os.environ['NAME'].")
    if key is not None and not key.strip():
        raise ConfigError(f"{what} is empty, and an empty key is not a key: is a variable not set? Give one, or none.")
    return key


def new_secret() -> bytes:
    """A secret for `sign_attempt_key`; as long as it lives, the keys signed with it stay valid."""
    return secrets.token_bytes(32)


def new_key() -> str:
    """A random key for a server. It has the form of attempts' keys, so that `redacted` shortens it too."""
    while True:
        text = secrets.token_urlsafe(24)
        if any(letter.isupper() for letter in text):  # by which it is told from a name
            return PREFIX + text


def derived_secret(key: str) -> bytes:
    """The secret that everybody knows who knows a store's admin key, so that runners elsewhere need one key only."""
    not_empty(key, "The store's key")
    return hmac.digest(key.encode(), b"agentlightning attempt keys", "sha256")


def sign_attempt_key(secret: bytes, rollout_id: str, attempt_id: str, scopes: Sequence[str] = ALL_SCOPES) -> str:
    """The API key of an attempt."""
    payload = msgspec.json.encode(AttemptKey(rollout_id, attempt_id, tuple(scopes)))
    return PREFIX + _encode(_signature(secret, payload) + payload)


def verify_attempt_key(secret: bytes, key: str) -> AttemptKey | None:
    """What `key` says, or None if it was not signed with `secret` (or is no such key at all)."""
    if not key.startswith(PREFIX):
        return None
    try:
        raw = _decode(key[len(PREFIX) :])
    except (binascii.Error, ValueError):
        return None
    signature, payload = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _signature(secret, payload)):
        return None
    return msgspec.json.decode(payload, type=AttemptKey)


def sign_url_key(secret: bytes, rollout_id: str, attempt_id: str, scopes: Sequence[str]) -> str:
    """The key that stands in the URL of an attempt."""
    payload = msgspec.json.encode(AttemptKey(rollout_id, attempt_id, tuple(scopes)))
    return f"{''.join(_LETTERS[scope] for scope in scopes)}-{_encode(_signature(secret, payload))}"


def verify_url_key(secret: bytes, rollout_id: str, attempt_id: str, key: str) -> AttemptKey | None:
    """What the key in a URL of this attempt says, or None if it was not made for it with `secret`."""
    letters, _, _ = key.partition("-")
    if not all(letter in _SCOPES for letter in letters):
        return None
    scopes = tuple(_SCOPES[letter] for letter in letters)
    if not hmac.compare_digest(key.encode(), sign_url_key(secret, rollout_id, attempt_id, scopes).encode()):
        return None
    return AttemptKey(rollout_id, attempt_id, scopes)


def redacted(text: str) -> str:
    """The text with keys shortened to their beginnings, which tell them apart and open nothing."""
    if "key" not in text and PREFIX not in text:  # much faster to find
        return text
    return _SECRETS.sub(r"\1\2…", text)


def redacted_pieces(pieces: Sequence[str]) -> list[str]:
    """The same for a text in pieces, such as its tokens: what is left out of it is missing in the pieces it was in."""
    whole = "".join(pieces)
    if redacted(whole) == whole:
        return list(pieces)
    hidden = [(max(found.end(1), found.end(2)), found.end()) for found in _SECRETS.finditer(whole)]
    shown, start = [], 0
    for piece in pieces:
        shown.append("".join(_letter(letter, at, hidden) for at, letter in enumerate(piece, start)))
        start += len(piece)
    return shown


def _letter(letter: str, at: int, hidden: Sequence[tuple[int, int]]) -> str:
    """The letter, or what stands in its place where it is one of those that are hidden."""
    if any(first == at for first, _ in hidden):
        return "…"
    return "" if any(first <= at < end for first, end in hidden) else letter


def _signature(secret: bytes, payload: bytes) -> bytes:
    not_empty(secret, SECRET)
    return hmac.digest(secret, payload, "sha256")[:_SIGNATURE_BYTES]


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4))
