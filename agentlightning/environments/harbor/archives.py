"""Archives that a box packs and this machine unpacks. What would lead out of the folder is left out."""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agentlightning.errors import ExecutorError
from agentlightning.litagent.process import Limits

_SECONDS, _SHOWN = 1800.0, 10_000
NO_FOLDER = 3
"""The exit code of `PACK` where its place is no folder."""
PACK = f'[ -d "$0" ] || exit {NO_FOLDER}; exec tar -cf - "$@" -C "$0" .'
"""A line of shell that packs what is in a folder, without what fits the patterns that follow it."""


def excluded(patterns: Sequence[str]) -> list[str]:
    """The patterns as arguments of tar, which says what fits them."""
    return [f"--exclude={pattern}" for pattern in patterns]


def not_packed(place: str, complaint: str) -> ExecutorError:
    """The error of a box whose tar did not pack a place with patterns."""
    why = next((line for line in complaint.splitlines() if line.strip()), "it said nothing")
    return ExecutorError(f"{place} cannot be packed; artifacts with `exclude` need a tar with --exclude: {why[:300]}")


async def streamed(command: Sequence[str], environment: Mapping[str, str], to: Path) -> tuple[int, str]:
    """Write what a command says to a file; its exit code, and the end of its errors. Raises ExecutorError where it goes
    on for too long: what packs is a program of the box, which may say anything for as long as it likes."""
    with to.open("wb") as file, tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *Limits().wrap(command), stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=errors, env=dict(environment)
        )
        try:
            async with asyncio.timeout(_SECONDS):
                code = await process.wait()
        except TimeoutError:
            raise ExecutorError(f"A box took more than {_SECONDS:g} s to pack files.") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())
        errors.seek(max(0, os.fstat(errors.fileno()).st_size - _SHOWN))
        return code, errors.read(_SHOWN).decode(errors="replace")


def unpacked(archive: Path, folder: Path, name: str, to: Path) -> bool:
    """Move one file or folder of an archive to a place; whether it is there. What would lead out of it, what is no
    file or folder, and files with holes, which may seem to have any size, are left out. Raises ExecutorError for what
    is no archive, or a compressed one, which may be a bomb."""

    def kept(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
        with suppress(tarfile.FilterError):
            return None if member.issparse() else tarfile.data_filter(member, place)
        return None

    try:
        with tarfile.open(archive, "r:") as opened:
            opened.extractall(folder, filter=kept)
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:  # the last two for forged headers
        raise ExecutorError(f"{name} of a box is no archive: {error}.") from None
    found = folder / name
    if found.is_symlink() or not found.exists():
        return False
    shutil.move(found, to)
    return True
