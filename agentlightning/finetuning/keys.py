"""Keys: the admin key makes others, and each of these sees its own files, jobs and models. Their hashes are kept."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from typing import Any

from agentlightning.finetuning.records import Records, Row
from agentlightning.finetuning.wire import missing, new_id
from agentlightning.gateway.exchange import Refusal

ADMIN = "admin"
"""The owner of what the admin key makes, and of all that is made where no key is wanted."""


class Keys:
    """Tells whose a request is."""

    def __init__(self, records: Records, admin_key: str | None) -> None:
        """Without an admin key all requests are the admin's."""
        self._records = records
        self._admin_key = admin_key
        self._lent: dict[str, str] = {}

    def owner(self, *given: str) -> str:
        """Whose the first of these keys is that is one. Raises `Refusal` where none is."""
        for key in given:
            if self._admin_key is None or self.is_admin(key):
                return ADMIN
            if key in self._lent:
                return self._lent[key]
            found = self._records.row("SELECT id FROM keys WHERE hash = ?", _hash(key))
            if found is not None:
                return found["id"]
        raise Refusal(
            "This server needs one of its keys: give it to the client as api_key.",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )

    def is_admin(self, given: str) -> bool:
        """Whether it is the admin key, where there is one."""
        return self._admin_key is not None and hmac.compare_digest(given.encode(), self._admin_key.encode())

    def lend(self, owner: str) -> str:
        """A key for what a job of this owner asks of the server; good until the server ends."""
        key = f"sk-job-{secrets.token_urlsafe(32)}"
        self._lent[key] = owner
        return key

    def take_back(self, key: str) -> None:
        self._lent.pop(key, None)

    def create(self, name: str) -> dict[str, Any]:
        """A new key, which is shown only this once."""
        value, key = f"sk-{secrets.token_urlsafe(32)}", new_id("key_")
        self._records.add("keys", id=key, name=name, hash=_hash(value), created_at=int(time.time()))
        row = self._records.row("SELECT * FROM keys WHERE id = ?", key)
        assert row is not None
        return {**seen(row), "value": value}

    def list(self) -> list[dict[str, Any]]:
        return [seen(row) for row in self._records.rows("SELECT * FROM keys ORDER BY created_at, id")]

    def delete(self, key: str) -> None:
        """What it made stays, and nobody sees it any more."""
        if not self._records.remove("keys", key):
            raise missing("key", key)


def seen(row: Row) -> dict[str, Any]:
    shown = {name: row[name] for name in ("id", "name", "created_at")}
    owner = {"type": "service_account", "id": row["id"], "name": row["name"], "role": "member"}
    return {**shown, "object": "organization.admin_api_key", "redacted_value": "sk-…", "owner": owner}


def _hash(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()
