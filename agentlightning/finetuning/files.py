"""Files that clients send: kept once by their content, read back as they came, gone when nothing needs them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from agentlightning.files import make_folder, open_private
from agentlightning.finetuning.records import FINISHED, Records, Row
from agentlightning.finetuning.wire import bad, missing, new_id
from agentlightning.gateway.exchange import Refusal
from agentlightning.reading import whole_number

PURPOSES = ("fine-tune",)
RESULTS = "fine-tune-results"
_MOST_FORM_BYTES = 1 << 16
"""Of all fields of a form that are no file."""
_SHORTEST, _LONGEST = 3600, 2_592_000
"""Seconds after which a file may expire."""


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes that are kept."""

    sha256: str
    size: int


class Blobs:
    """A folder of contents, each under its SHA-256."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self._folder = folder
        self.arriving: Counter[str] = Counter()
        """Bytes of each key that are on their way in."""

    def sweep(self, known: Collection[str]) -> None:
        """Remove what a server that was killed had kept and not yet named."""
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    def path(self, sha256: str) -> Path:
        return self._folder / sha256

    @contextmanager
    def writing(self, owner: str = "", check: Callable[[], None] | None = None) -> Iterator[IncomingBytes]:
        """Bytes of a key that come in pieces; they are kept where `IncomingBytes.keep` was called. `check` is called
        for each piece, which counts among those on their way in, and raises where there is no room for it."""
        work = self._folder / f".incoming-{secrets.token_hex(8)}"
        with open_private(work, "xb") as file:
            incoming = IncomingBytes(self, work, file, owner, check)
            try:
                yield incoming
            finally:
                work.unlink(missing_ok=True)
                self.arriving[owner] -= incoming.size
                if not self.arriving[owner]:
                    del self.arriving[owner]

    def write(self, data: bytes) -> Content:
        with self.writing() as incoming:
            incoming.write(data)
            return incoming.keep()

    async def joined(self, parts: Sequence[str], md5: str | None) -> Content:
        """The contents one behind the other, as a new one. Raises `Refusal` where it has another MD5 than is said."""
        with self.writing() as incoming:
            found = await asyncio.to_thread(self._copy, parts, incoming)
            if md5 not in (None, found):
                raise bad("The parts have another MD5 together.", "md5")
            return incoming.keep()

    def _copy(self, parts: Sequence[str], incoming: IncomingBytes) -> str:
        """The MD5 of what was copied, which is on the disk."""
        digest = hashlib.md5(usedforsecurity=False)
        for sha256 in parts:
            with self.path(sha256).open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
                    incoming.write(piece)
        incoming.sync()
        return digest.hexdigest()


class IncomingBytes:
    """Bytes on their way in."""

    def __init__(
        self, blobs: Blobs, work: Path, file: Any, owner: str = "", check: Callable[[], None] | None = None
    ) -> None:
        self._blobs, self._work, self._file = blobs, work, file
        self._owner, self._check = owner, check
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        self.size += len(data)
        self._blobs.arriving[self._owner] += len(data)
        if self._check is not None:
            self._check()
        self._file.write(data)
        self._hash.update(data)

    def sync(self) -> None:
        """Wait until they are on the disk, which may take seconds."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def keep(self) -> Content:
        """Put them in their place, all at once."""
        self._file.flush()
        found = Content(self._hash.hexdigest(), self.size)
        os.replace(self._work, self._blobs.path(found.sha256))
        return found


class Form:
    """A multipart form with one file, read piece by piece."""

    def __init__(self, kind: str, incoming: IncomingBytes, most: int) -> None:
        options = parse_options_header(kind)[1]
        if b"boundary" not in options:
            raise bad("Send the file as a form: Content-Type: multipart/form-data with a boundary.", "file")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.files: set[str] = set()
        """The names of the fields that held a file."""
        self._incoming, self._most = incoming, most
        self._name, self._header, self._value = "", b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._is_file = False
        self._parts: dict[str, bytearray] = {}
        callbacks: Any = {
            "on_part_begin": self._headers.clear,
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers,
            "on_part_data": self._on_data,
        }
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)
        except FormParserError as error:
            raise _unreadable(error) from None

    async def read(self, stream: AsyncIterator[bytes]) -> None:
        """Raises `Refusal`."""
        try:
            async for piece in stream:
                self._parser.write(piece)
            self._parser.finalize()
        except FormParserError as error:
            raise _unreadable(error) from None
        self.fields = {name: value.decode("utf-8", "replace") for name, value in self._parts.items()}

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _on_headers(self) -> None:
        options = parse_options_header(self._headers.get(b"content-disposition", b""))[1]
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options
        if self._is_file:
            if self.files:
                raise bad("The form holds more than one file.", self._name)
            self.files.add(self._name)
            self.filename = os.path.basename(options[b"filename"].decode("utf-8", "replace"))[:255]

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            if self._incoming.size + end - start > self._most:
                raise Refusal(
                    f"The file has more than {self._most} bytes, as many as a file may have here.",
                    status=413,
                    param="file",
                    code="file_too_large",
                )
            self._incoming.write(data[start:end])
            return
        if sum(map(len, self._parts.values())) + end - start > _MOST_FORM_BYTES or len(self._parts) > 16:
            raise bad("The form has too many fields besides the file.", self._name[:100])
        self._parts.setdefault(self._name, bytearray()).extend(data[start:end])


def _unreadable(error: FormParserError) -> Refusal:
    return bad(f"The form cannot be read: {error}.", "file")


class Files:
    """The files of all keys."""

    def __init__(self, records: Records, blobs: Blobs) -> None:
        self._records = records
        self._blobs = blobs
        known = {row["sha256"] for table in ("files", "parts") for row in records.rows(f"SELECT sha256 FROM {table}")}
        blobs.sweep(known)

    def add(self, owner: str, content: Content, filename: str, purpose: str, lifetime: int | None = None) -> Row:
        """A new file of these contents."""
        now, key = int(time.time()), new_id("file-")
        self._records.add(
            "files",
            id=key,
            owner=owner,
            sha256=content.sha256,
            bytes=content.size,
            filename=filename,
            purpose=purpose,
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
        )
        return self.get(owner, key)

    @contextmanager
    def naming(self, content: Content) -> Iterator[None]:
        """The block gives a new content a row. Where it fails, nothing of the content is left on the disk."""
        try:
            yield
        except BaseException:
            self.release(content.sha256)
            raise

    def get(self, owner: str, key: str) -> Row:
        """Raises `Refusal` for one that is not there, or not for this key."""
        found = self._records.row("SELECT * FROM files WHERE id = ? AND owner = ?", key, owner)
        if found is None or (found["expires_at"] or time.time() + 1) <= time.time():
            raise missing("file", key)
        return found

    def path(self, row: Row) -> Path:
        return self._blobs.path(row["sha256"])

    def delete(self, row: Row) -> None:
        """Forget a file; its content goes once no other file, part or unfinished job needs it."""
        marks = ", ".join("?" * len(FINISHED))
        used = self._records.row(
            f"SELECT id FROM jobs WHERE status NOT IN ({marks}) AND instr(request, ?)", *FINISHED, f'"{row["id"]}"'
        )
        if used is not None:
            raise bad(
                f"The job {used['id']} needs this file. Cancel it first, or wait for its end.", "file_id", "in_use"
            )
        self._records.remove("files", row["id"])
        self.release(row["sha256"])

    def release(self, *contents: str) -> None:
        """Remove the contents that nothing names. What their rows were is committed before: else they may come back."""
        for sha256 in contents:
            rows = (self._records.row(f"SELECT id FROM {t} WHERE sha256 = ?", sha256) for t in ("files", "parts"))
            if not any(rows):
                self._blobs.path(sha256).unlink(missing_ok=True)

    def expire(self) -> None:
        """Delete what is past its time, but for what a job needs; of uploads their parts."""
        late = "SELECT id FROM uploads WHERE status = 'pending' AND expires_at <= ?"
        for upload in self._records.rows(late, time.time()):
            self.release(*self.end_upload(upload["id"], status="expired"))
        for row in self._records.rows("SELECT * FROM files WHERE expires_at <= ?", time.time()):
            try:
                self.delete(row)
            except Refusal:
                continue

    def end_upload(self, upload: str, **values: Any) -> list[str]:
        """Change an upload that gets no more parts, and forget those that it has. Their contents are to be released."""
        parts = self._records.rows("SELECT id, sha256 FROM parts WHERE upload = ?", upload)
        with self._records.transaction():
            self._records.change("uploads", upload, **values)
            for part in parts:
                self._records.remove("parts", part["id"])
        return [part["sha256"] for part in parts]

    def stored_bytes(self, owner: str) -> int:
        """Of a key's files, of the parts of its uploads, and of what is on its way in."""
        sums = "SELECT coalesce(sum(bytes), 0) AS n FROM"
        of_files = self._records.row(f"{sums} files WHERE owner = ?", owner)
        of_parts = self._records.row(
            f"{sums} parts WHERE upload IN (SELECT id FROM uploads WHERE owner = ? AND status = 'pending')", owner
        )
        return sum(row["n"] for row in (of_files, of_parts) if row) + self._blobs.arriving[owner]


def lifetime_of(fields: Mapping[str, Any]) -> int | None:
    """The seconds after which a file expires, of `expires_after` as a form or JSON has it."""
    given = fields.get("expires_after")
    if given is None:
        given = {
            name: fields.get(f"expires_after[{name}]")
            for name in ("anchor", "seconds")
            if f"expires_after[{name}]" in fields
        }
    if not given:
        return None
    if not isinstance(given, Mapping) or given.get("anchor") != "created_at":
        raise bad("expires_after counts from 'created_at'.", "expires_after[anchor]")
    seconds = given.get("seconds")
    found = whole_number(seconds) if isinstance(seconds, str) else seconds
    if not isinstance(found, int) or not _SHORTEST <= found <= _LONGEST:
        raise bad(f"expires_after has {_SHORTEST} to {_LONGEST} seconds.", "expires_after[seconds]")
    return found


def check_purpose(purpose: Any) -> None:
    if purpose not in PURPOSES:
        raise bad(f"purpose is {purpose!r}; files here are for {', '.join(PURPOSES)}.", "purpose")


def seen(row: Row) -> dict[str, Any]:
    """A file as clients see it."""
    shown = {name: row[name] for name in ("id", "bytes", "created_at", "filename", "purpose", "expires_at")}
    return {**shown, "object": "file", "status": "processed", "status_details": None}
