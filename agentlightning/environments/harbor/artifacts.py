"""What crosses over from the boxes of a task to a verifier apart, and the commands that prepare it.

The order is Harbor's: commands and artifacts of main come first, then those of other services, which main, stopped by
then, cannot disturb. Each artifact gets the place that it had. A command that fails is recorded, and nothing ends.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from agentlightning.environments.harbor.boxes import Box
from agentlightning.environments.harbor.compose import MAIN, Composition
from agentlightning.environments.harbor.format import Artifact, Collect, HarborTask, Stage
from agentlightning.errors import AgentError, ConfigError, ExecutorError

Record = Callable[[Mapping[str, Any]], object]
"""Takes what happened, for the attempt's trace."""
PUBLISHED = "/logs/artifacts"
"""A folder that crosses over without being named."""
_SHOWN = 2000


def check_services(task: HarborTask, composition: Composition | None) -> None:
    """Raises ConfigError where an artifact or a command is of a service that the task does not have."""
    known = {MAIN, *(composition.services if composition else ())}
    for stage in task.stages:
        for one in (*stage.artifacts, *stage.verifier.collect):
            if (one.service or MAIN) not in known:
                what = "artifacts" if isinstance(one, Artifact) else "verifier.collect"
                raise ConfigError(
                    f"{task.folder}: {what}: there is no service {one.service}. There is {', '.join(sorted(known))}."
                )


async def collect(box: Box, stage: Stage, to: Path, record: Record, *, stops: bool) -> list[tuple[str, Path]]:
    """Run a stage's commands and fetch its artifacts to a folder: what was fetched, each with its place in a box.

    stops: whether main is stopped before anything is taken from other services.
    """
    taken: list[tuple[Artifact, Path]] = []
    claimed: list[PurePosixPath] = []
    missing: list[str] = []
    for of_main in (True, False):
        commands = [one for one in stage.verifier.collect if (one.service == MAIN) is of_main]
        artifacts = [one for one in declared(stage.artifacts) if (one.service in (None, MAIN)) is of_main]
        if not of_main and stops and (commands or artifacts):
            await box.stop()
        await run_commands(box, commands, record)
        for artifact in artifacts:
            place = to / str(len(claimed))
            if _overlaps(artifact, claimed) or not await _fetch(box, artifact, place):
                missing.append(artifact.source)
                continue
            claimed.append(_output(artifact))
            taken.append((artifact, place))
    if missing := [one for one in missing if one != PUBLISHED]:
        record({"artifacts": {"not_there_or_taken_before": missing}})
    return [(artifact.source, place) for artifact, place in taken]


async def run_commands(box: Box, commands: Iterable[Collect], record: Record) -> None:
    """Run commands that prepare artifacts, each in its service."""
    for one in commands:
        ended: dict[str, object] = {"command": one.command[:_SHOWN], "service": one.service}
        try:
            async with asyncio.timeout(one.timeout_sec):
                done = await _service(box, one.service).shell(one.command, user=one.user)
            if done.exit_code == 0:
                continue
            ended |= {"exit_code": done.exit_code, "output": (done.stdout + done.stderr)[-_SHOWN:]}
        except TimeoutError:
            ended["timed_out"] = True
        except (ExecutorError, AgentError) as error:
            ended["error"] = str(error)[:_SHOWN]
        record({"collect": ended})


async def place_in(apart: Box, fetched: Iterable[tuple[str, Path]], to: Path) -> None:
    """Put what was fetched into a verifier's box, at the places that it had. A folder is emptied first."""
    for number, (source, found) in enumerate(fetched):
        if found.is_dir():
            place = shlex.quote(source)
            await apart.shell(f"mkdir -p {place} && find {place} -mindepth 1 -delete; chmod 777 {place}", user=0)
            await apart.put(found, source)
            continue
        folder, name = to / f"file-{number}", source.rpartition("/")[2]
        folder.mkdir()
        found.rename(folder / name)
        await apart.put(folder, source.rpartition("/")[0] or ".")


def declared(artifacts: Sequence[Artifact]) -> list[Artifact]:
    """The artifacts, and the folder that needs no declaration where none of them is that."""
    if any(one.service in (None, MAIN) and one.source.rstrip("/") == PUBLISHED for one in artifacts):
        return [*artifacts]
    return [Artifact(source=PUBLISHED), *artifacts]


def _service(box: Box, name: str | None) -> Box:
    return box if name in (None, MAIN) else box.services[name]


async def _fetch(box: Box, artifact: Artifact, place: Path) -> bool:
    return await _service(box, artifact.service).fetch(artifact.source, place, artifact.exclude)


def _output(artifact: Artifact) -> PurePosixPath:
    """Where Harbor keeps an artifact: what would lie in or around another one is left out, as it does."""
    return PurePosixPath((artifact.destination or artifact.source).strip("/") or ".")


def _overlaps(artifact: Artifact, claimed: Iterable[PurePosixPath]) -> bool:
    output = _output(artifact)
    return any(output == one or output in one.parents or one in output.parents for one in claimed)
