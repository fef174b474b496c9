"""Programs for Node with the real packages (`npm install` in this folder), and how they are run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import agentlightning as agl

HOME = Path(__file__).parent


def version(package: str) -> str:
    """Of an installed package. Raises ModuleNotFoundError, by which the tests skip it."""
    file = HOME / "node_modules" / package / "package.json"
    if not file.is_file():
        raise ModuleNotFoundError(f"npm install in {HOME}", name=package)
    return json.loads(file.read_text())["version"]


async def run(
    program: str, question: str, llm: agl.LLM, stream: bool, *, required: bool = False, provider: str = ""
) -> str:
    """What the program prints; the arguments of its one call where a call is `required`.

    `provider` is for a program that has several clients to choose from.
    """
    arguments = [
        str(HOME / program),
        question,
        llm.endpoint,
        llm.model,
        "stream" if stream else "",
        "required" if required else "",
        provider,
    ]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("node", *arguments, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-2000:]
    return out.decode()
