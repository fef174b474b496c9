"""A cluster's API server in memory, as far as an attempt needs one: Jobs, pods, Secrets, logs, and watches.

With the Job controller and the garbage collector, which make the pods, end Jobs, and delete what has no owner any more.
Nothing here runs a pod: `kubelet.py` does, through the same requests as with a real API server. `fault` makes the next
requests fail.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PATH = r"/{group:api/v1|apis/batch/v1}/namespaces/{namespace}/{kind}"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
KINDS = {"jobs": "apis/batch/v1", "pods": "api/v1", "secrets": "api/v1"}

Json = dict[str, Any]


@dataclass
class Fault:
    """What happens to the next requests of a verb for a kind."""

    verb: str
    kind: str
    status: int
    """Of the answer; 0: the request is carried out, and the connection dies before the answer."""
    times: int
    headers: dict[str, str] = field(default_factory=dict)


class Trouble(Exception):
    def __init__(self, status: int, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.status, self.reason = status, reason

    def body(self) -> Json:
        told = {"status": "Failure", "message": str(self), "reason": self.reason, "code": self.status}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **told}


class ApiServer:
    """Its state is `objects`, by kind and name."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {}
        self.asked: Counter[str] = Counter()
        """Requests by verb and kind."""
        self.log_of: Callable[[str], bytes] = lambda pod: b""
        """What a pod wrote; the kubelet knows."""
        self.token = ""
        """What opens it, if that is not empty."""
        self.replaces_pods = False
        """Whether a Job whose pod was deleted gets another one, as in Kubernetes 1.20."""
        self._faults: list[Fault] = []
        self._ids = itertools.count(1)
        self._late: set[str] = set()
        self._version = 0
        self._oldest = 0
        self._events: list[tuple[int, str, str, Json]] = []
        self._changed = asyncio.Condition()

    async def start(self, context: ssl.SSLContext | None = None) -> str:
        """Returns its URL; with a context, of TLS."""
        app = web.Application()
        app.router.add_route("*", PATH, self._handle)
        app.router.add_route("*", PATH + "/{name}", self._handle)
        app.router.add_route("*", PATH + "/{name}/{part}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        return f"{'https' if context else 'http'}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    def fault(self, verb: str, kind: str, status: int, times: int = 1, **headers: str) -> None:
        self._faults.append(Fault(verb, kind, status, times, headers))

    def forget_history(self) -> None:
        """Watches from before now are answered with 410, as after a compaction."""
        self._oldest = self._version

    def of(self, kind: str) -> list[Json]:
        return [found for (its, _), found in self.objects.items() if its == kind]

    # ---- requests --------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        where = request.match_info
        kind, name, part = where["kind"], where.get("name", ""), where.get("part", "")
        verb = "WATCH" if request.query.get("watch") else "LOG" if part == "log" else request.method
        fault = None
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response(Trouble(401, "Unauthorized").body(), status=401)
        if "X-Kubelet" not in request.headers:
            self.asked[f"{verb} {kind}"] += 1
            fault = next((f for f in self._faults if (f.verb, f.kind) == (verb, kind) and f.times > 0), None)
        try:
            if KINDS.get(kind) != where["group"]:
                raise Trouble(404, "NotFound", "the server could not find the requested resource")
            if fault is not None:
                fault.times -= 1
                if fault.status == 200:  # somebody else answers
                    return web.Response(text="<html>Please sign in.</html>")
                if fault.status:
                    refused = Trouble(fault.status, "Faulty", f"made to fail with {fault.status}")
                    return web.json_response(refused.body(), status=fault.status, headers=fault.headers)
            if verb == "WATCH":
                return await self._watch(request, kind)
            if verb == "LOG":
                return self._log(name)
            answer = await self._change(request, verb, kind, name, part)
        except Trouble as trouble:
            return web.json_response(trouble.body(), status=trouble.status)
        if fault is not None:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(answer, status=201 if verb == "POST" else 200)

    async def _change(self, request: web.Request, verb: str, kind: str, name: str, part: str) -> Json:
        if verb == "GET" and not name:
            found = [o for o in self.of(kind) if _selected(o, request.query.get("labelSelector", ""))]
            return {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": found}
        body = json.loads(await request.read() or b"{}")
        if verb == "POST" and part == "binding":
            return self._merge(kind, name, {"spec": {"nodeName": body["target"]["name"]}})
        if verb == "POST":
            return self._create(kind, body, request.match_info["namespace"])
        if (kind, name) not in self.objects:
            raise Trouble(404, "NotFound", f'{kind} "{name}" not found')
        if verb == "GET":
            return self.objects[kind, name]
        if verb == "PATCH":
            return self._merge(kind, name, body)
        if verb == "DELETE":
            now = request.query.get("gracePeriodSeconds") == "0" or body.get("gracePeriodSeconds") == 0
            self._delete(kind, name, now=now)
            return {"kind": "Status", "status": "Success"}
        raise Trouble(405, "MethodNotAllowed")

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        seen, selector = int(request.query["resourceVersion"]), request.query.get("labelSelector", "")
        if seen < self._oldest:
            gone = Trouble(410, "Expired", f"too old resource version: {seen} ({self._oldest})")
            await response.write(json.dumps({"type": "ERROR", "object": gone.body()}).encode() + b"\n")
            return response
        try:
            async with asyncio.timeout(int(request.query.get("timeoutSeconds", "60"))):
                while True:
                    async with self._changed:
                        await self._changed.wait_for(lambda: self._version > seen)  # noqa: B023
                    for version, its, what, found in list(self._events):
                        if version > seen and its == kind and _selected(found, selector):
                            await response.write(json.dumps({"type": what, "object": found}).encode() + b"\n")
                    seen = self._version
        except (TimeoutError, ConnectionResetError):
            return response

    def _log(self, name: str) -> web.Response:
        pod = self.objects.get(("pods", name))
        if pod is None:
            raise Trouble(404, "NotFound", f'pods "{name}" not found')
        if not pod.get("status", {}).get("containerStatuses"):
            raise Trouble(400, "BadRequest", f'container "program" in pod "{name}" is waiting to start')
        return web.Response(body=self.log_of(name))

    # ---- state -----------------------------------------------------------------------------------------------------

    def _create(self, kind: str, body: Json, namespace: str) -> Json:
        meta = body["metadata"]
        if not NAME.fullmatch(meta["name"]) or not all(LABEL.fullmatch(v) for v in meta.get("labels", {}).values()):
            raise Trouble(422, "Invalid", f"{kind} {meta['name']!r} is invalid: metadata")
        if (kind, meta["name"]) in self.objects:
            raise Trouble(409, "AlreadyExists", f'{kind} "{meta["name"]}" already exists')
        body["metadata"] = {**meta, "uid": f"uid-{next(self._ids)}", "namespace": namespace}
        self._store(kind, "ADDED", body)
        if kind == "jobs":
            self._make_pod(body)
        return body

    def _merge(self, kind: str, name: str, change: Json) -> Json:
        if (kind, name) not in self.objects:
            raise Trouble(404, "NotFound", f'{kind} "{name}" not found')
        merged = _merged(self.objects[kind, name], change)
        self._store(kind, "MODIFIED", merged)
        self._control(merged if kind == "jobs" else None)
        return merged

    def _delete(self, kind: str, name: str, *, now: bool = False) -> None:
        found = self.objects[kind, name]
        running = kind == "pods" and "nodeName" in found["spec"] and not now
        if running:  # the kubelet ends it, and deletes it then
            self._store(kind, "MODIFIED", _merged(found, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))
            return
        self._note(kind, "DELETED", self.objects.pop((kind, name)))
        for its, other in list(self.objects):
            owners = self.objects.get((its, other), {}).get("metadata", {}).get("ownerReferences", ())
            if any(owner["uid"] == found["metadata"]["uid"] for owner in owners):
                self._delete(its, other)
        self._control(None)

    def _store(self, kind: str, what: str, found: Json) -> None:
        self.objects[kind, found["metadata"]["name"]] = found
        self._note(kind, what, found)

    def _note(self, kind: str, what: str, found: Json) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, what, found))
        asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ---- the Job controller ------------------------------------------------------------------------------------------

    def _make_pod(self, job: Json) -> None:
        template, name = job["spec"]["template"], job["metadata"]["name"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        labels = {**template["metadata"]["labels"], "job-name": name}
        meta = {
            **template["metadata"],
            "name": f"{name}-{next(self._ids):05x}",
            "labels": labels,
            "ownerReferences": [owner],
        }
        pod = {"kind": "Pod", "metadata": meta, "spec": template["spec"], "status": {"phase": "Pending"}}
        self._create("pods", pod, job["metadata"]["namespace"])

    def _control(self, late: Json | None) -> None:
        """End the Jobs whose pod has ended or is gone, and the one whose deadline was set to 1."""
        for job in self.of("jobs"):
            if job.get("status", {}).get("conditions"):
                continue
            uid, name = job["metadata"]["uid"], job["metadata"]["name"]
            pods = [p for p in self.of("pods") if p["metadata"]["ownerReferences"][0]["uid"] == uid]
            if job is late and job["spec"]["activeDeadlineSeconds"] == 1:
                self._late.add(name)
                asyncio.get_running_loop().call_later(0.3, self._end_late, name)  # the pods go first, as in Kubernetes
                for pod in pods:
                    self._delete("pods", pod["metadata"]["name"])
            if name in self._late:
                continue
            if not pods and self.replaces_pods:
                self._make_pod(job)
                continue
            phase = pods[0]["status"]["phase"] if pods else "Failed"
            if phase in ("Failed", "Succeeded"):
                failed = {"type": "Failed", "reason": "BackoffLimitExceeded", "message": "has reached the limit"}
                why = failed if phase == "Failed" else {"type": "Complete"}
                status = {"conditions": [{**why, "status": "True"}], phase.lower(): 1}
                self._store("jobs", "MODIFIED", _merged(self.objects["jobs", name], {"status": status}))

    def _end_late(self, name: str) -> None:
        if (job := self.objects.get(("jobs", name))) is not None:
            why = {"type": "Failed", "reason": "DeadlineExceeded", "message": "Job was active longer", "status": "True"}
            self._store("jobs", "MODIFIED", _merged(job, {"status": {"conditions": [why]}}))


def _merged(found: Json, change: Json) -> Json:
    """JSON merge patch (RFC 7386)."""
    result = dict(found)
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name) or {}, value) if isinstance(value, dict) else value
    return result


def _selected(found: Json, selector: str) -> bool:
    labels = found["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, _, value in (s.partition("=") for s in selector.split(",") if s))
