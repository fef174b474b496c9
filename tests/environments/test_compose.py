"""Tasks of several containers: what of a task's docker-compose.yaml is refused, and what runs, in real containers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.environments.harbor import HarborEnvironment, project
from agentlightning.environments.harbor.compose import Composition, ImageRecipe, in_waves, read_composition
from agentlightning.environments.harbor.compose_keys import SERVICE_KEYS
from agentlightning.environments.harbor.format import EnvironmentSection, read_task
from agentlightning.environments.harbor.project import find_compose
from agentlightning.environments.harbor.trial import Verified, run_trial
from agentlightning.errors import ConfigError, ExecutorError
from agentlightning.litagent.process import Captured
from agentlightning.types.ids import random_hex
from tests.environments.compose_tasks import CLIENT, IMAGE, LIMITS, composes, services, write_composed
from tests.environments.harbor_tasks import engine_or_skip
from tests.environments.interpreters import interpreter
from tests.environments.model import answering, attempted


def read(folder: Path, text: Any, allowed: tuple[str, ...] = (), **section: Any) -> Composition:
    """What a file in a folder comes to, next to a Dockerfile, a folder and a link out of it."""
    build = folder / "environment"
    (build / "given").mkdir(parents=True, exist_ok=True)
    (build / "Dockerfile").write_text("FROM x\n")
    (build / "given" / "Dockerfile").write_text("FROM y\n")
    if not (build / "link").is_symlink():
        (build / "link").symlink_to("/etc")
    (build / "docker-compose.yaml").write_text(text if isinstance(text, str) else json.dumps(text))
    return read_composition(build, EnvironmentSection(**section), {"WORD": "hello", "EMPTY": ""}, allowed)


# ---- what is refused -------------------------------------------------------------------------------------------------

DANGEROUS: dict[str, Any] = {
    "privileged": True,
    "cap_add": ["SYS_ADMIN"],
    "security_opt": ["seccomp=unconfined"],
    "devices": ["/dev/kmsg"],
    "device_cgroup_rules": ["c 1:3 mr"],
    "gpus": "all",
    "network_mode": "host",
    "pid": "host",
    "ipc": "host",
    "uts": "host",
    "userns_mode": "host",
    "cgroup": "host",
    "cgroup_parent": "/",
    "runtime": "other",
    "sysctls": {"net.core.somaxconn": 1},
    "ports": ["8080:80"],
    "extra_hosts": ["host:host-gateway"],
    "links": ["main"],
    "external_links": ["theirs"],
    "volumes_from": ["container:theirs"],
    "env_file": ["/etc/environment"],
    "extends": {"file": "/etc/other.yaml", "service": "x"},
    "secrets": ["one"],
    "configs": ["one"],
    "credential_spec": {"file": "x"},
    "group_add": ["docker"],
    "dns": ["1.2.3.4"],
    "logging": {"driver": "syslog"},
    "oom_score_adj": -1000,
    "profiles": ["x"],
    "develop": {},
    "post_start": [{"command": "x", "privileged": True}],
    "provider": {"type": "x"},
    "use_api_socket": True,
    "annotations": {"run.oci.keep_original_groups": "1"},
    "pull_policy": "always",
    "no_such_key": 1,
}
VALUES: dict[str, tuple[Any, str]] = {
    "a folder of this machine": ({"volumes": ["/etc:/x"]}, "volumes"),
    "the engine's socket": ({"volumes": ["/var/run/docker.sock:/var/run/docker.sock:ro"]}, "volumes"),
    "the home folder": ({"volumes": ["~/x:/x"]}, "volumes"),
    "a folder above": ({"volumes": ["../tests:/x"]}, "volumes"),
    "a folder above, as a mapping": ({"volumes": [{"type": "bind", "source": "..", "target": "/x"}]}, "volumes"),
    "a link": ({"volumes": ["./link:/x"]}, "volumes"),
    "below a link": ({"volumes": ["./link/passwd:/x"]}, "volumes"),
    "propagation": ({"volumes": ["./given:/x:rshared"]}, "volumes"),
    "options of a mount": (
        {"volumes": [{"type": "bind", "source": "./given", "target": "/x", "bind": {"propagation": "shared"}}]},
        "bind",
    ),
    "a pipe": ({"volumes": [{"type": "npipe", "source": "x", "target": "/x"}]}, "npipe"),
    "a volume that is not there": ({"volumes": ["theirs:/x"]}, "theirs"),
    "a root": ({"volumes": ["./given:/"]}, "no place"),
    "a context above": ({"build": ".."}, "build.context"),
    "a context of a URL": ({"build": "https://example.org/x.git"}, "build.context"),
    "a context that is a link": ({"build": "./link"}, "build.context"),
    "a Dockerfile of another place": ({"build": {"context": ".", "dockerfile": "/etc/passwd"}}, "build.dockerfile"),
    "the host's network in a build": ({"build": {"context": ".", "network": "host"}}, "network"),
    "an ssh agent in a build": ({"build": {"context": ".", "ssh": ["default"]}}, "ssh"),
    "privileges in a build": ({"build": {"context": ".", "privileged": True}}, "privileged"),
    "a variable of ours in a build": ({"build": {"context": ".", "args": ["HOME"]}}, "HOME"),
    "an image of a folder": ({"image": "dir:/etc"}, "image"),
    "an image of a file": ({"image": "docker-archive:x"}, "image"),
    "an option as image": ({"image": "--privileged"}, "image"),
    "a variable of ours": ({"environment": ["HOME"]}, "HOME"),
    "a variable of ours, as a mapping": ({"environment": {"HOME": None}}, "HOME"),
    "a variable that is none": ({"environment": {"A=$$(id)": "1"}}, "no name"),
    "a network that is not there": ({"networks": ["host"]}, "no network host"),
    "an address": ({"networks": {"default": {"ipv4_address": "10.0.0.1"}}}, "ipv4_address"),
    "an option as user": ({"user": "--privileged"}, "user"),
    "a user of options": ({"user": "0 --privileged"}, "user"),
    "an option as hostname": ({"hostname": "--x"}, "hostname"),
    "a device reserved": ({"deploy": {"resources": {"reservations": {"devices": []}}}}, "reservations"),
    "an option as size": ({"mem_limit": "--x"}, "mem_limit"),
    "a capability": ({"cap_drop": ["--privileged"]}, "cap_drop"),
    "tmpfs with options": ({"tmpfs": ["/x:exec,dev"]}, "tmpfs"),
    "limits of nobody": ({"ulimits": {"nofile": -1}}, "ulimits"),
    "text for a flag": ({"init": "yes please"}, "init"),
    "a number for words": ({"command": {"a": 1}}, "command"),
    "words that do not end": ({"command": "sh -c '"}, "command"),
    "itself before itself": ({"depends_on": ["db"]}, "wait for one another"),
    "nobody before": ({"depends_on": ["nobody"]}, "nobody"),
    "healthy without a check": ({"depends_on": {"main": {"condition": "service_healthy"}}}, "no healthcheck"),
    "a condition that is none": ({"depends_on": {"main": {"condition": "x"}}}, "service_started"),
    "a healthcheck of nothing": ({"healthcheck": {"test": ["CMD"]}}, "healthcheck.test"),
    "a time that is none": ({"healthcheck": {"test": "true", "interval": "soon"}}, "healthcheck.interval"),
}
FILES: dict[str, tuple[Any, str]] = {
    "include": ({"include": ["/etc/x.yaml"], "services": {}}, "include"),
    "secrets": ({"secrets": {"a": {"file": "/etc/passwd"}}}, "secrets"),
    "configs": ({"configs": {"a": {"environment": "HOME"}}}, "configs"),
    "a volume that is a folder of this machine": (
        {"volumes": {"v": {"driver_opts": {"type": "none", "o": "bind", "device": "/etc"}}}},
        "driver_opts",
    ),
    "a volume of another driver": ({"volumes": {"v": {"driver": "nfs"}}}, "volumes.v.driver"),
    "a volume of somebody else": ({"volumes": {"v": {"external": True}}}, "external"),
    "a volume with a name": ({"volumes": {"v": {"name": "theirs"}}}, "name"),
    "a network of somebody else": ({"networks": {"n": {"external": True}}}, "external"),
    "a network on this machine's": ({"networks": {"n": {"driver": "macvlan"}}}, "networks.n.driver"),
    "a network with options": ({"networks": {"n": {"driver_opts": {"parent": "eth0"}}}}, "driver_opts"),
    "addresses": ({"networks": {"n": {"ipam": {}}}}, "ipam"),
    "the host's network by its name": ({"networks": {"n": {"name": "host"}}}, "name"),
    "a name with a slash": ({"services": {"../x": {"image": "x"}}}, "no name"),
    "an option as name": ({"services": {"--x": {"image": "x"}}}, "no name"),
    "a key that is no text": ("services: {1: {image: x}}", "no text"),
    "a list": ("[1]", "no mapping"),
    "no YAML": ("services: {", "cannot be read as YAML"),
    "a class of Python": ("services: !!python/object/apply:os.system ['true']", "cannot be read as YAML"),
    "a date": ("services: {main: {environment: {A: 2020-01-01}}}", "in quotes"),
    "a loop": ("services: &a {main: {environment: {A: *a}}}", "nested deeper"),
    "a bomb": (
        "x-a: &a [1,1,1,1,1,1,1,1]\n"
        + "".join(f"x-{b}: &{b} [{','.join(['*' + a] * 8)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)),
        "more than",
    ),
    "a long file": ("#" * 300_000, "longer than"),
    "many services": ({"services": {f"s{n}": {"image": "x"} for n in range(30)}}, "more than"),
}


@pytest.mark.parametrize("service", ["main", "db"])
@pytest.mark.parametrize("key", DANGEROUS)
def test_what_a_service_may_not_have_is_refused_by_its_name(key: str, service: str, tmp_path: Path) -> None:
    assert key not in SERVICE_KEYS
    given = {"db": {"image": "x"}, "main": {}}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {"services": {**given, service: {**given[service], key: DANGEROUS[key]}}})
    assert f"services.{service}: {key} is not taken from a task" in str(caught.value)
    assert "docker-compose.yaml" in str(caught.value)


@pytest.mark.parametrize("kind", VALUES)
def test_what_a_key_may_not_hold_is_refused(kind: str, tmp_path: Path) -> None:
    given, words = VALUES[kind]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {"services": {"db": {"image": "x", **given}}})
    assert words in str(caught.value)
    assert "services" in str(caught.value)


@pytest.mark.parametrize("kind", FILES)
def test_what_a_file_may_not_have_is_refused(kind: str, tmp_path: Path) -> None:
    document, words = FILES[kind]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, document)
    assert words in str(caught.value)


def test_variables_are_the_tasks_and_those_that_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "key")
    monkeypatch.setenv("WORD", "ours")

    def value(text: str, *allowed: str) -> str:
        found = read(tmp_path, {"services": {"main": {"environment": {"A": text}}}}, allowed)
        return found.services["main"].environment["A"]

    assert value("${WORD} $WORD-${NONE:-x}${NONE-y}${EMPTY:-z}${EMPTY-z}") == "hello hello-xyz"
    assert value("$$WORD $${SECRET}") == "$WORD ${SECRET}"
    assert value("${SECRET:-none}") == "none"
    assert value("${SECRET}", "SECRET") == "key"
    for text in ("${SECRET}", "$SECRET", "a${PATH}"):
        with pytest.raises(ConfigError, match="allow it with variables"):
            value(text)
    for text in ("${SECRET:?no}", "${SECRET:+x}", "${SECRET:-${PATH}}", "${}", "$1"):
        with pytest.raises(ConfigError, match="is no variable"):
            value(text)


def test_main_is_as_in_harbor(tmp_path: Path) -> None:
    build = tmp_path / "environment"
    own = {
        "services": {"main": {"image": "${MAIN_IMAGE_NAME}", "cpus": "${CPUS}"}, "db": {"image": "${MAIN_IMAGE_NAME}"}}
    }
    found = read(tmp_path, own, cpus=2, memory_mb=512)
    main = found.services["main"]
    assert main.image == found.services["db"].image == ImageRecipe(build, build / "Dockerfile")
    assert main.settings == {"mem_limit": "512m", "cpus": 2.0}
    assert (main.environment, found.services["db"].environment) == ({"WORD": "hello", "EMPTY": ""}, {})
    assert read(tmp_path, {"services": {}}, docker_image="theirs:1").services["main"].image == "theirs:1"
    given = {"services": {"main": {"build": "${CONTEXT_DIR}/given", "environment": {"WORD": "mine"}}}}
    assert read(tmp_path, given).services["main"].image == ImageRecipe(build / "given", build / "given" / "Dockerfile")
    assert read(tmp_path, given).services["main"].environment["WORD"] == "hello"
    (build / "Dockerfile").unlink()
    (build / "docker-compose.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"services\.main needs an image"):
        read_composition(build, EnvironmentSection(), {}, ())


def test_folders_of_logs_are_shared_with_main(tmp_path: Path) -> None:
    shared = "${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}"
    found = read(tmp_path, {"services": {"db": {"image": "x", "volumes": [shared]}}})
    assert found.services["main"].mounts == found.services["db"].mounts
    assert found.services["main"].mounts[0].target == "/logs/verifier"


def test_services_start_after_those_they_depend_on(tmp_path: Path) -> None:
    found = read(tmp_path, services())
    assert [[service.name for service in wave] for wave in in_waves(found.services)] == [
        ["prepare"],
        ["words"],
        ["main"],
    ]


def test_what_is_refused_is_refused_before_anything_runs(tmp_path: Path) -> None:
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    task = write_composed(tmp_path / "task", {"services": {"main": {"privileged": True}}})
    with pytest.raises(ConfigError, match=r"services\.main: privileged"):
        agl.load_environment(f"harbor:{task}", engine="podman").tasks()
    with pytest.raises(ConfigError, match="container_options"):
        agl.load_environment(f"harbor:{task}", engine="podman", container_options=["--privileged"]).tasks()
    if shutil.which("bwrap") is not None:
        with pytest.raises(ConfigError, match="engine=podman"):
            agl.load_environment(f"harbor:{task}", engine="bubblewrap").tasks()
    (task / "environment" / "docker-compose.yaml").unlink()
    (task / "environment" / "docker-compose.yaml").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="a link to another place"):
        agl.load_environment(f"harbor:{task}", engine="podman").tasks()


def test_no_compose_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_compose.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(ConfigError, match="apt-get install podman-compose"):
            find_compose("podman")
        with pytest.raises(ConfigError, match="apt-get install docker-compose"):
            find_compose("docker")
    finally:
        find_compose.cache_clear()


# ---- in containers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def podman() -> None:
    """Skips where podman starts no services."""
    if (why := composes()) is not None:
        pytest.skip(why)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> str:
    """How the names of this test's projects begin: others may start and end projects of theirs meanwhile."""
    digits = random_hex(8)
    monkeypatch.setattr(project, "random_hex", lambda count: digits + random_hex(count))
    return f"agl-services-{digits}"


def left(begin: str) -> str:
    """What there is of the projects whose names begin so."""
    listed = [
        ["podman", "ps", "-aq", "--filter", f"name={begin}"],
        ["podman", "pod", "ls", "-q", "--filter", f"name={begin}"],
        ["podman", "network", "ls", "-q", "--filter", f"name={begin}"],
        ["podman", "volume", "ls", "-q", "--filter", f"name={begin}"],
    ]
    return "".join(subprocess.run(one, capture_output=True, check=True, text=True).stdout for one in listed)


def done(task: Path, work: Callable[[Any], Any]) -> Verified:
    """What somebody who works in main comes to."""
    env = HarborEnvironment(str(task), engine="podman")

    async def worker(box: Any, stage: Any, captured: Captured) -> int:
        await work(box)
        return 0

    return asyncio.run(run_trial(read_task(task), worker, env.settings))


@pytest.fixture(params=["podman", "podman, newest", "docker"])
def engine(request: pytest.FixtureRequest, podman: None) -> Iterator[str]:
    """An engine with its compose: podman's of the system and of PyPI, and Docker's with podman as its server."""
    with pytest.MonkeyPatch.context() as patched:
        find_compose.cache_clear()
        if request.param == "podman, newest":
            python = interpreter("PODMAN_COMPOSE_PYTHON", ("podman-compose==1.6.0",), (sys.executable,))
            patched.setenv("PATH", f"{Path(python).parent}:{os.environ['PATH']}")
        if request.param == "docker":
            engine_or_skip("docker")
            try:
                find_compose("docker")
            except ConfigError as error:
                pytest.skip(str(error))
        yield request.param.split(",")[0]
    find_compose.cache_clear()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_main_asks_another_service(engine: str, begin: str, tmp_path: Path) -> None:
    """The service reads what a third one prepared, a file of the task and a variable."""
    version = subprocess.run([*find_compose(engine), "version"], capture_output=True, text=True, check=True).stdout
    older = "podman-composer" in version  # as 1.0.3 calls itself, which gives no further names
    task = write_composed(tmp_path / "task", services(**({} if older else {"container_name": "other"})))
    if not older:
        (task / "solution" / "solve.sh").write_text(CLIENT.replace("words", "other"))
    env = agl.load_environment(f"harbor:{task}", engine=engine)

    async def probes() -> dict[str, Any]:
        return {probe.by: probe.why or probe.reward async for probe in env.probes(env.tasks())}

    assert asyncio.run(probes()) == {"solution": 1.0, "nothing": 0.0}
    assert left(begin) == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_attempt_writes_to_files_of_its_own(podman: None, tmp_path: Path) -> None:
    main = {"volumes": ["./given:/given", "./given/server.pl:/ro.pl:ro"], "working_dir": "/app", **LIMITS}
    task = write_composed(
        tmp_path / "task",
        {"services": {"main": {**main, "environment": {"PRICE": "a$$b ${WORD}"}}}},
        more='[environment]\nenv = { WORD = "hello" }\n',
    )
    found: list[str] = []

    async def work(box: Any) -> None:
        script = 'echo mine > /given/mine; rm /given/server.pl; echo x > /ro.pl; tr "\\0" "\\n" < /proc/1/environ'
        found.append((await box.shell(script)).stdout)
        await box.shell("printf hello > out.txt")

    assert done(task, work).rewards == {"reward": 1.0}
    assert [file.name for file in (task / "environment" / "given").iterdir()] == ["server.pl"]
    assert {"PRICE=a$b hello", "WORD=hello"} <= set(found[0].splitlines())


AGENT = """\
use IO::Socket::INET;
my ($host, $port) = $ENV{OPENAI_BASE_URL} =~ m{//([^:/]+):(\\d+)};
my $body = '{"model": "m", "messages": [{"role": "user", "content": "What word?"}]}';
my $s = IO::Socket::INET->new(PeerAddr => $host, PeerPort => $port) or die "no model: $!";
print $s "POST /v1/chat/completions HTTP/1.0\\r\\nHost: 127.0.0.1:$port\\r\\nContent-Type: application/json\\r\\n" .
    "Authorization: Bearer $ENV{OPENAI_API_KEY}\\r\\nContent-Length: " . length($body) . "\\r\\n\\r\\n$body";
my $answer = join '', <$s>;
my ($word) = $answer =~ /"content": ?"(\\w+)"/ or die "no answer: $answer";
open(my $f, '>', '/app/out.txt'); print $f $word;
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_in_main_reaches_its_model(podman: None, tmp_path: Path) -> None:
    task = write_composed(
        tmp_path / "task",
        {"services": {"main": LIMITS}},
        dockerfile=f"FROM {IMAGE}\nWORKDIR /app\nCOPY agent.pl /\n",
        files={"environment/agent.pl": AGENT},
    )
    env = agl.load_environment(f"harbor:{task}", agent="perl /agent.pl {task.prompt}", engine="podman")
    one = env.tasks()[0]
    rewards: list[Any] = []
    with answering(lambda _: "hello") as llm, pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "agentlightning.environments.harbor.environment.emit_reward", lambda value, _: rewards.append(value)
        )
        asyncio.run(env.agent.rollout_async(one, {"main": llm}, attempted(one)))
    assert rewards == [{"reward": 1.0}]


FAILING = {
    "a service that ends": ({"command": ["sh", "-c", "echo broken >&2; sleep 1; exit 3"]}, "exit code 3"),
    "a program that is not there": ({"command": ["/nowhere"]}, "words"),
    "a service that is never healthy": (
        {"healthcheck": {"test": "false", "interval": "1s", "retries": 1, "timeout": "1s"}},
        "did not become healthy",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FAILING)
def test_a_service_that_fails_is_no_reward_of_0(podman: None, begin: str, kind: str, tmp_path: Path) -> None:
    more, words = FAILING[kind]
    task = write_composed(tmp_path / "task", services(**more))
    with pytest.raises(ExecutorError, match=words):
        done(task, lambda _: asyncio.sleep(0))
    assert left(begin) == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_attempt_that_is_cancelled_leaves_nothing(podman: None, begin: str, tmp_path: Path) -> None:
    task = write_composed(tmp_path / "task")
    env = HarborEnvironment(str(task), engine="podman")
    begun = asyncio.Event()

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        begun.set()
        return (await box.run(["sh", "-c", "sleep 86398"], captured=captured)).exit_code

    for starting in (True, False):  # while services start, and while the agent works
        begun.clear()
        running = asyncio.create_task(run_trial(read_task(task), work, env.settings))
        await (asyncio.sleep(4) if starting else begun.wait())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await asyncio.to_thread(left, begin) == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_leaves_nothing(podman: None, begin: str, tmp_path: Path) -> None:
    task = write_composed(tmp_path / "task")
    code = f"""
        import asyncio
        from pathlib import Path
        from agentlightning.environments.harbor import HarborEnvironment, project
        from agentlightning.environments.harbor.format import read_task
        from agentlightning.environments.harbor.trial import run_trial
        project.random_hex = lambda _: {begin.removeprefix("agl-services-")!r}
        env = HarborEnvironment({str(task)!r}, engine="podman")
        async def work(box, stage, captured):
            print("works", flush=True)
            return (await box.run(["sleep", "86397"])).exit_code
        asyncio.run(run_trial(read_task(Path({str(task)!r})), work, env.settings))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"works\n"
        assert left(begin) != ""
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 100
    while (left(begin) or list(tmp_path.glob("agl-harbor-*"))) and time.monotonic() < deadline:
        time.sleep(1)
    assert left(begin) == ""
    assert not list(tmp_path.glob("agl-harbor-*"))
