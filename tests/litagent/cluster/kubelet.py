"""Scheduler and kubelet of a cluster without containers: it runs each pod's command as a process of this machine.

It speaks to the API server, ours or a real one, as a kubelet does: binds pods, reads their Secrets, tells their status,
and deletes those that were asked to go. Mounts are folders whose paths stand in for the mounts' own. Some images
have fates of their own, see `FATES`; the others run.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

NODE = "this-machine"
MERGE = {"Content-Type": "application/merge-patch+json"}

Json = dict[str, Any]


def _ended(code: int, reason: str, message: str = "") -> Json:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [_status(state)]}


def _status(state: Json) -> Json:
    """Of the program's container; the API server wants all of it."""
    return {"name": "program", "image": "", "imageID": "", "restartCount": 0, "ready": False, "state": state}


def _waits(reason: str, message: str) -> Json:
    return {"phase": "Pending", "containerStatuses": [_status({"waiting": {"reason": reason, "message": message}})]}


def expanded(argument: str, environment: Mapping[str, str]) -> str:
    """A kubelet puts variables in the place of their $(NAME), and leaves one $ of two."""
    return re.sub(r"\$(\$|\((.*?)\))", lambda m: "$" if m[1] == "$" else environment.get(m[2], m[0]), argument)


FATES: Mapping[str, Json] = {
    "oom": _ended(137, "OOMKilled"),
    "childs-oom": _ended(0, "OOMKilled", '{"reward": 0.5}'),
    "no-such-program": _ended(128, "StartError", 'exec: "agent": executable file not found in $PATH'),
    "missing": _waits("ImagePullBackOff", 'Back-off pulling image "missing"'),
    "slow-pull": _waits("ContainerCreating", "the image is large"),
    "evicted": {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
    "greedy": {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
    },
    "preempted": {
        **_ended(137, "Error"),
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}],
    },
}
"""By the name of an image: the status that its pods get in place of a run."""


class Kubelet:
    """Of the one node. `logs` is what each pod wrote."""

    def __init__(self, url: str, folder: Path, namespace: str = "default") -> None:
        self._url, self._folder, self._namespace = url, folder, namespace
        self.logs: dict[str, bytearray] = {}
        self.environments: dict[str, Mapping[str, str]] = {}
        """What each program was given, by pod."""
        self._running: dict[str, asyncio.Task[None]] = {}

    async def join(self, certificate: Path) -> web.AppRunner:
        """Become a node of a real cluster, whose API server fetches logs here; the file has a key, too."""
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._log)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        trusted = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        trusted.load_cert_chain(certificate)
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=trusted).start()
        port = {"daemonEndpoints": {"kubeletEndpoint": {"Port": runner.addresses[0][1]}}}
        status = {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}], **port}
        async with aiohttp.ClientSession(headers=MERGE) as http:
            nodes = f"{self._url}/api/v1/nodes"
            json = {"Content-Type": "application/json"}
            await (await http.post(nodes, json={"metadata": {"name": NODE}}, headers=json)).read()  # it may be there
            async with http.patch(f"{nodes}/{NODE}/status", json={"status": status}) as response:
                assert response.status == 200, await response.text()
        return runner

    async def _log(self, request: web.Request) -> web.Response:
        return web.Response(body=bytes(self.logs[request.match_info["pod"]]))

    async def run(self) -> None:
        """Until it is cancelled."""
        async with aiohttp.ClientSession(headers={"X-Kubelet": NODE}) as self._http:
            try:
                while True:
                    for pod in (await self._ask("GET", "pods"))["items"]:
                        with suppress(LookupError):  # it is gone, or its Secret is not there yet: look again
                            await self._look_after(pod)
                    await asyncio.sleep(0.02)
            finally:
                for task in self._running.values():
                    task.cancel()
                await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _look_after(self, pod: Json) -> None:
        name = pod["metadata"]["name"]
        image = pod["spec"]["containers"][0]["image"].partition(":")[0]
        if "deletionTimestamp" in pod["metadata"]:
            if (task := self._running.pop(name, None)) is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await self._ask("DELETE", f"pods/{name}", {"gracePeriodSeconds": 0})
        elif name not in self._running and image != "unschedulable":
            if "nodeName" not in pod["spec"]:
                target = {"target": {"kind": "Node", "name": NODE}, "metadata": {"name": name}}
                await self._ask("POST", f"pods/{name}/binding", target)
            if image in FATES:
                self.logs[name] = bytearray(b"its last words\n")
                self._running[name] = asyncio.create_task(self._tell(name, FATES[image]))
            else:
                self._running[name] = asyncio.create_task(self._run(name, *await self._prepared(pod)))

    async def _prepared(self, pod: Json) -> tuple[list[str], dict[str, str], Path]:
        """The command, its environment and its working directory, with folders of ours in place of mounts."""
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        places = {container["terminationMessagePath"]: self._folder / name / "message"}
        for volume in pod["spec"]["volumes"]:
            folder = self._folder / name / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            if "secret" in volume:
                data = await self._secret(volume["secret"]["secretName"])
                for item in volume["secret"]["items"]:
                    (folder / item["path"]).write_bytes(data[item["key"]])
            mounts = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == volume["name"]]
            places |= {mount: folder for mount in mounts if mount != "/tmp"}  # which is part of too many paths here
        environment = {"PATH": os.environ["PATH"]}
        for variable in container["env"]:
            if "valueFrom" in variable:
                ref = variable["valueFrom"]["secretKeyRef"]
                environment[variable["name"]] = (await self._secret(ref["name"]))[ref["key"]].decode()
            else:
                environment[variable["name"]] = variable["value"]
        self.environments[name] = dict(environment)
        for mount, place in places.items():
            environment = {n: v.replace(mount, str(place)) for n, v in environment.items()}
        command = [expanded(argument, self.environments[name]) for argument in container["command"]]
        for mount, place in places.items():
            command = [argument.replace(mount, str(place)) for argument in command]
        return command, environment, self._folder / name / "workspace"

    async def _secret(self, name: str) -> dict[str, bytes]:
        data = (await self._ask("GET", f"secrets/{name}"))["data"]
        return {key: b64decode(value) for key, value in data.items()}

    async def _run(self, name: str, command: list[str], environment: dict[str, str], folder: Path) -> None:
        log = self.logs[name] = bytearray()
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=environment,
            start_new_session=True,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            await self._tell(name, {"phase": "Running", "containerStatuses": [_status({"running": {}})]})
            assert process.stdout is not None
            while part := await process.stdout.read(65536):
                log += part
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        message = folder.parent / "message"
        told = message.read_text()[:4096] if message.exists() else ""
        await self._tell(name, _ended(code if code >= 0 else 128 - code, "Error" if code else "Completed", told))

    async def _tell(self, name: str, status: Json) -> None:
        with suppress(LookupError):
            await self._ask("PATCH", f"pods/{name}/status", {"status": status})

    async def _ask(self, method: str, path: str, body: Any = None) -> Json:
        """Raises LookupError for what is not there."""
        url = f"{self._url}/api/v1/namespaces/{self._namespace}/{path}"
        headers = MERGE if method == "PATCH" else {}
        async with self._http.request(method, url, json=body, headers=headers) as response:
            if response.status in (404, 409):
                raise LookupError(path)
            assert response.status < 300, (method, path, await response.text())
            return await response.json()
