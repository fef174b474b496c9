"""What a task's box reaches: the hosts that its list has, in the phases that say so, and nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from agentlightning.environments.harbor import HarborEnvironment
from agentlightning.environments.harbor.egress import Egress, NetworkPolicy, checked_host
from agentlightning.environments.harbor.format import read_task
from agentlightning.environments.harbor.trial import composition_of, run_trial
from agentlightning.errors import ConfigError
from agentlightning.litagent.process import Captured
from tests.environments.compose_tasks import write_composed
from tests.environments.harbor_tasks import ENGINES, engine_or_skip, write_task

LISTED = ("example.org", "*.example.com", "192.0.2.7", "198.51.100.0/24", "2001:db8::/32")
HOSTS = {
    "example.org": True,
    "EXAMPLE.org.": True,
    "www.example.org": False,
    "notexample.org": False,
    "a.b.example.com": True,
    "example.com": False,
    "example.com.evil.net": False,
    "192.0.2.7": True,
    "192.0.2.70": False,
    "198.51.100.200": True,
    "::ffff:198.51.100.200": True,
    "2001:db8::1": True,
    "2001:db9::1": False,
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_is_reached_where_the_list_has_it(host: str) -> None:
    assert NetworkPolicy("allowlist", LISTED).names(host) is HOSTS[host]
    assert NetworkPolicy("public").names(host)
    assert not NetworkPolicy("no-network").names(host)


@pytest.mark.parametrize("host", LISTED)
def test_entries_are_compared_as_names_are(host: str) -> None:
    assert checked_host(f" {host.upper()}. ") == host


@pytest.mark.parametrize(
    "host", ["", "*", "*.", "a*.org", "*.1.2.3.4", "https://x.org", "x.org:80", "x.org/p", "1.2.3.4/8"]
)
def test_what_is_no_host_is_no_entry(host: str) -> None:
    with pytest.raises(ValueError, match="is no name of a host"):
        checked_host(host)


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, "host": self.headers["Host"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def pages(host: str) -> Iterator[int]:
    """A web server at an address of this machine; its port."""
    with ThreadingHTTPServer((host, 0), _Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


@pytest.fixture
def address() -> str:
    """An address of this machine that is not its loopback."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as one:
        try:
            one.connect(("192.0.2.1", 9))  # which sends nothing
        except OSError:
            pytest.skip("this machine has no address but its loopback")
        found = one.getsockname()[0]
    if ip_address(found).is_loopback:
        pytest.skip("this machine has no address but its loopback")
    return found


def through(egress: Egress, *asked: str) -> list[str]:
    """What is answered to these requests, each over a connection of its own."""

    async def ask() -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            server = await asyncio.start_unix_server(egress, f"{folder}/proxy")
            answers = list[str]()
            for one in asked:
                reader, writer = await asyncio.open_unix_connection(f"{folder}/proxy")
                writer.write(one.encode())
                answers.append((await reader.read()).decode())
                writer.close()
            server.close()
            return answers

    return asyncio.run(ask())


def test_a_listed_host_is_reached_by_http_and_by_a_tunnel(address: str) -> None:
    with pages(address) as port:
        by_url, by_tunnel = through(
            Egress(NetworkPolicy("allowlist", (address,))),
            f"GET http://{address}:{port}/a?b HTTP/1.1\r\nHost: other.org\r\nProxy-Connection: x\r\n\r\n",
            f"CONNECT {address}:{port} HTTP/1.1\r\n\r\nGET /c HTTP/1.0\r\nHost: own\r\n\r\n",
        )
    assert json.loads(by_url.rpartition("\r\n")[2]) == {"path": "/a?b", "host": f"{address}:{port}"}
    assert by_tunnel.startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.0 200")
    assert json.loads(by_tunnel.rpartition("\r\n")[2]) == {"path": "/c", "host": "own"}


REFUSALS: dict[str, tuple[NetworkPolicy, Callable[[int], str], str]] = {
    "another host": (
        NetworkPolicy("allowlist", LISTED),
        lambda _: "GET http://other.org/ HTTP/1.1",
        "403 It may reach example.org",
    ),
    "another tunnel": (
        NetworkPolicy("allowlist", LISTED),
        lambda _: "CONNECT other.org:443 HTTP/1.1",
        "403 and other.org is not",
    ),
    "no network": (
        NetworkPolicy("no-network"),
        lambda _: "CONNECT example.org:443 HTTP/1.1",
        "403 network_mode is no-network",
    ),
    "our loopback": (
        NetworkPolicy("public"),
        lambda port: f"CONNECT 127.0.0.1:{port} HTTP/1.1",
        "403 machine that runs this box",
    ),
    "our loopback, mapped": (
        NetworkPolicy("public"),
        lambda port: f"CONNECT [::ffff:127.0.0.1]:{port} HTTP/1.1",
        "403 machine",
    ),
    "our name": (
        NetworkPolicy("allowlist", ("localhost",)),
        lambda port: f"GET http://localhost:{port}/ HTTP/1.1",
        "403 machine",
    ),
    "a cloud's keys": (NetworkPolicy("public"), lambda _: "GET http://169.254.169.254/latest HTTP/1.1", "403 machine"),
    "no proxy's request": (NetworkPolicy("public"), lambda _: "GET / HTTP/1.1", "400 proxy for HTTP and HTTPS"),
    "no HTTP": (NetworkPolicy("public"), lambda _: "\x16\x03\x01", "400 proxy for HTTP and HTTPS"),
    "another protocol": (
        NetworkPolicy("public"),
        lambda _: "GET ftp://example.org/ HTTP/1.1",
        "400 proxy for HTTP and HTTPS",
    ),
    "no port": (NetworkPolicy("public"), lambda _: "CONNECT example.org:x HTTP/1.1", "400 proxy for HTTP and HTTPS"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_not_reached_is_said(kind: str) -> None:
    policy, asked, expected = REFUSALS[kind]
    code, words = expected.split(" ", 1)
    with pages("127.0.0.1") as port:
        (answer,) = through(Egress(policy), f"{asked(port)}\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {code}")
    assert words in answer


def test_what_a_phase_leaves_out_ends_with_the_phase_before(address: str) -> None:
    async def tunnel() -> bytes:
        egress = Egress(NetworkPolicy("public"))
        with tempfile.TemporaryDirectory() as folder, pages(address) as port:
            server = await asyncio.start_unix_server(egress, f"{folder}/proxy")
            reader, writer = await asyncio.open_unix_connection(f"{folder}/proxy")
            writer.write(f"CONNECT {address}:{port} HTTP/1.1\r\n\r\n".encode())
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
            with egress.during(NetworkPolicy("no-network")):
                rest = await reader.read()
            writer.close()
            server.close()
            assert egress.policy == NetworkPolicy("public")
            return rest

    assert asyncio.run(tunnel()) == b""


def test_a_step_that_says_what_it_reaches_says_all_of_it(tmp_path: Path) -> None:
    listed = 'network_mode = "allowlist"\nallowed_hosts = ["Example.org"]\n'
    steps = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n[steps.agent]\nnetwork_mode = "no-network"\n'
    files = {f"steps/{name}/{file}": "" for name in ("one", "two") for file in ("instruction.md", "tests/test.sh")}
    task = write_task(tmp_path / "task", more=f"[agent]\n{listed}{steps}", files=files)
    only = NetworkPolicy("allowlist", ("example.org",))
    assert read_task(task).network_policies == (
        NetworkPolicy(),
        only,
        NetworkPolicy(),
        NetworkPolicy("no-network"),
        NetworkPolicy(),
    )


PHASES = ["environment", "agent", "verifier"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_network_that_would_not_be_kept_from_services_is_refused(phase: str, tmp_path: Path) -> None:
    task = write_composed(
        tmp_path / "task", {"services": {"main": {}}}, more=f'[{phase}]\nnetwork_mode = "no-network"\n'
    )
    settings = HarborEnvironment(str(task), **engine_or_skip("bubblewrap"), agent="nop").settings
    with pytest.raises(ConfigError, match="no-network"):
        composition_of(read_task(task), settings)


ASKS = """\
import json, os, sys, urllib.request
def asked(url, **proxies):
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(*proxies.values()))
        return opener.open(url, timeout=20).status
    except Exception as error:
        return getattr(error, "code", "none")
url = sys.argv[1]
print(json.dumps([asked(url), asked("http://192.0.2.1/"), asked(url, none={})]))
"""


@pytest.mark.parametrize("engine", [one for one in ENGINES if one != "bubblewrap"])
def test_each_phase_reaches_what_it_says_and_by_the_proxy_alone(engine: str, address: str, tmp_path: Path) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("a Python of the system is not installed")
    with pages(address) as port:
        ask = f"/usr/bin/python3 /app/asks.py http://{address}:{port}/"
        task = write_task(
            tmp_path / "task",
            more=f'[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["{address}"]\n'
            '[verifier]\nnetwork_mode = "no-network"\n',
            dockerfile="FROM localhost/agl-harbor-test\nWORKDIR /app\nCOPY asks.py .\n",
            files={"environment/asks.py": ASKS},
            test=f'#!/bin/sh\n[ "$({ask})" = "[403, 403, \\"none\\"]" ] && R=1 || R=0\n'
            "echo $R > /logs/verifier/reward.txt\n",
        )
        env = HarborEnvironment(str(task), **engine_or_skip(engine))
        said = list[str]()

        async def work(box: Any, stage: Any, captured: Captured) -> int:
            said.append((await box.shell(ask)).stdout)
            return 0

        found = asyncio.run(run_trial(read_task(task), work, env.settings))
    assert json.loads(said[0]) == [200, 403, "none"]
    assert found.rewards == {"reward": 1.0}
