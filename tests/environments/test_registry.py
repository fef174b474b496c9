"""`harbor:NAME@VERSION`: data sets by name, from a registry in a file or at a URL, fetched once by git."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.environments.harbor.dataset import digest_of
from agentlightning.environments.harbor.registry import newest
from agentlightning.environments.harbor.repository import cache_folder, fetched, inside
from agentlightning.errors import ConfigError
from tests.environments.harbor_tasks import engine_or_skip, write_task


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    return tmp_path / "cache"


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def committed(folder: Path) -> str:
    """The id of a commit of everything that is in a repository."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "tasks")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A repository with two tasks and something large beside them."""
    folder = tmp_path / "source"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for name in ("one", "two"):
        write_task(folder / "sets" / name)
    (folder / "large").write_text("x" * 1000)
    return folder


def entry(url: str, commit: str | None, *names: str, name: str = "mine", version: str = "1.0") -> dict[str, Any]:
    known = {} if commit is None else {"git_commit_id": commit}
    tasks = [{"name": one, "git_url": url, "path": f"sets/{one}", **known} for one in names]
    return {"name": name, "version": version, "description": "", "tasks": tasks, "metrics": []}


def registry(folder: Path, *entries: Any) -> str:
    file = folder / "registry.json"
    file.write_text(json.dumps(entries))
    return str(file)


def names_of(spec: str, **options: Any) -> list[str]:
    env = agl.load_environment(spec, **engine_or_skip("bubblewrap"), **options)
    return [task["name"] for task in env.tasks()]


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_tasks_by_name_are_fetched_once_and_done(source: Path, tmp_path: Path) -> None:
    file = registry(tmp_path, entry(source.as_uri(), committed(source), "two", "one"))
    options = {"registry_path": file, **engine_or_skip("bubblewrap")}
    env = agl.load_environment("harbor:mine@1.0", val="mine", **options)
    assert [task["name"] for task in env.tasks()] == ["tests/two", "tests/one"]
    assert [task["path"] for task in env.val_tasks()] == [task["path"] for task in env.tasks()]
    fetched_names = {path.name for path in cache_folder().rglob("*")}
    assert "task.toml" in fetched_names
    assert not {"large", ".git"} & fetched_names

    source.rename(tmp_path / "gone")
    again = agl.load_environment("harbor:mine@1.0", **options)

    async def rewards() -> dict[str, Any]:
        return {probe.by: probe.reward async for probe in again.probes(again.tasks()[:1])}

    assert asyncio.run(rewards()) == {"solution": 1.0, "nothing": 0.0}


VERSIONS = {
    "head": ["1.0", "head", "9.0"],
    "10.0": ["9.1", "10.0", "2.0"],
    "1.0": ["1.0rc1", "1.0", "0.9"],
    "1.0.post1": ["1.0", "1.0.post1"],
    "2": ["parity", "2", "1.9"],
    "parity": ["alpha", "parity"],
}


@pytest.mark.parametrize("expected", VERSIONS)
def test_a_name_alone_means_the_newest_version(expected: str) -> None:
    assert newest(VERSIONS[expected]) == newest(reversed(VERSIONS[expected])) == expected


def test_a_name_alone_is_looked_up_in_all_versions(source: Path, tmp_path: Path) -> None:
    url, commit = source.as_uri(), committed(source)
    file = registry(tmp_path, *(entry(url, commit, one, version=v) for one, v in (("one", "1.9"), ("two", "1.10"))))
    assert names_of("harbor:mine", registry_path=file) == ["tests/two"]
    assert names_of("harbor:mine@1.9", registry_path=file) == ["tests/one"]


def test_a_branch_and_no_commit_mean_what_is_there_now(source: Path, tmp_path: Path) -> None:
    first = committed(source)
    git(source, "tag", "--annotate", "v1", "--message", "v1")
    entries = [entry(source.as_uri(), name, "one", name=name or "none") for name in (None, "main", "v1", "head")]
    file = registry(tmp_path, *entries)
    write_task(source / "sets" / "one", instruction="Another.")
    second = committed(source)
    found = {
        name: Path(
            agl.load_environment(f"harbor:{name}", registry_path=file, **engine_or_skip("bubblewrap")).tasks()[0][
                "path"
            ]
        )
        for name in ("none", "main", "v1", "head")
    }
    assert {name: path.parents[1].name for name, path in found.items()} == {
        "none": second,
        "main": second,
        "head": second,
        "v1": first,
    }


def test_folders_beside_a_registry_are_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(tmp_path / "here" / "one")
    file = registry(tmp_path / "here", {"name": "local", "version": "1", "tasks": [{"name": "one", "path": "./one"}]})
    monkeypatch.chdir(tmp_path)
    assert names_of("harbor:local@1", registry_path=file) == ["tests/one"]
    assert names_of("harbor:local", registry_path="here/registry.json") == ["tests/one"]


def test_a_folder_is_a_folder_unless_a_registry_is_given(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path / "mine" / "here")
    monkeypatch.chdir(tmp_path)
    assert names_of("harbor:mine") == ["tests/here"]
    file = registry(tmp_path, entry(source.as_uri(), committed(source), "one"))
    assert names_of("harbor:mine", registry_path=file) == ["tests/one"]
    with pytest.raises(ConfigError, match="has no effect"):
        names_of("harbor:./mine", registry_path=file)


def test_a_task_is_found_in_the_cache_of_another_machine(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = registry(tmp_path, entry(source.as_uri(), committed(source), "one"))
    options = {"registry_path": file, "agent": "oracle", **engine_or_skip("bubblewrap")}
    task = agl.load_environment("harbor:mine", **options).tasks()[0]
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "runner" / "cache"))
    runner = agl.load_environment("harbor:mine", **options)
    runner.agent.check_task(task)
    for other in (f"{tmp_path}/nothing", task["path"].replace("sets/one", "sets/two")):
        with pytest.raises(ConfigError, match=r"task\.toml cannot be read"):
            runner.agent.check_task({**task, "path": other})


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_not_in_a_registry_is_named(source: Path, tmp_path: Path) -> None:
    url, commit = source.as_uri(), committed(source)
    file = registry(tmp_path, entry(url, commit, "one", name="swe-tasks"), entry(url, commit, name="empty"))
    for spec, words in {
        "swe-task": "Did you mean swe-tasks",
        "quite-other": "It has empty, swe-tasks",
        "team/quite-other": "hub",
        "swe-tasks@2": r"has no swe-tasks@2. Its versions: 1\.0",
        "empty": "has no tasks",
    }.items():
        with pytest.raises(ConfigError, match=words):
            names_of(f"harbor:{spec}", registry_path=file)
    with pytest.raises(ConfigError, match="not both"):
        names_of("harbor:mine", registry_path=file, registry_url="https://example.org/registry.json")
    with pytest.raises(ConfigError, match="For a file give registry_path"):
        names_of("harbor:mine", registry_url=file)


MALFORMED = {
    "no JSON": ("[", "is no JSON"),
    "an object": ('{"datasets": []}', "no list of data sets"),
    "no name": ('[{"version": "1"}]', "data set 0 has no name"),
    "a number as version": ('[{"name": "mine", "version": 1}]', "data set 0 has no name and version as texts"),
    "no tasks": ('[{"name": "mine", "version": "1"}]', "tasks: this key has to be there"),
    "a task without a path": ('[{"name": "mine", "version": "1", "tasks": [{"name": "a"}]}]', r"tasks\.0\.path"),
    "a task that is not there": (
        '[{"name": "mine", "version": "1", "tasks": [{"name": "a", "path": "a"}]}]',
        "there is no task.toml in",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_registry_that_is_none_is_refused(kind: str, tmp_path: Path) -> None:
    text, words = MALFORMED[kind]
    file = tmp_path / "registry.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        names_of("harbor:mine", registry_path=str(file))
    with pytest.raises(ConfigError, match=r"missing\.json cannot be read"):
        names_of("harbor:mine", registry_path=str(tmp_path / "missing.json"))


URLS = {
    "ext::sh -c touch%20harm": "its URL has to begin with",
    "--upload-pack=touch harm": "its URL has to begin with",
    "-x@host:path": "its URL has to begin with",
    "http://127.0.0.1:1/tasks.git": "its URL has to begin with",
    "/somewhere/tasks": "its URL has to begin with",
    "file:///somewhere/\ntasks": "its URL has to begin with",
    "https://me:secret@127.0.0.1:1/tasks.git": r"https://127\.0\.0\.1:1/tasks\.git cannot be fetched",
}


@pytest.mark.parametrize("url", URLS)
def test_what_git_is_not_given(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=URLS[url]) as caught:
        names_of("harbor:mine", registry_path=registry(tmp_path, entry(url, "a" * 40, "one")))
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("path", ["../out", "/etc", "a/../../b", ".", "", ".git/hooks", "a/.GIT", "a\nb", "a\\b"])
def test_a_path_stays_inside_of_the_repository(path: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"repository|characters"):
        inside(path)
    broken = entry(source.as_uri(), committed(source), "one")
    broken["tasks"][0]["path"] = path
    with pytest.raises(ConfigError, match="the task one"):
        names_of("harbor:mine", registry_path=registry(tmp_path, broken))


def test_what_a_repository_lacks_is_named(source: Path) -> None:
    url, commit = source.as_uri(), committed(source)
    for wanted, paths, words in [
        ("0" * 40, ["sets/one"], "The commit 0000"),
        (commit[:10], ["sets/one"], "a commit has 40 digits"),
        ("other", ["sets/one"], "no branch or tag 'other'"),
        (commit, ["sets/three"], "has no folder sets/three"),
        (commit, ["large"], "has no folder large"),
    ]:
        with pytest.raises(ConfigError, match=words):
            fetched(url, wanted, paths)
    assert not [path for path in cache_folder().rglob("*") if path.is_file()]
    assert [path.name for path in fetched(url, commit, ["sets/two", "sets/one", "sets/two"])] == ["two", "one", "two"]


def test_links_that_leave_a_task_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    write_task(tmp_path / "secret" / "task")
    (source / "sets" / "one" / "inner").symlink_to("task.toml")
    (source / "sets" / "two" / "outer").symlink_to("../one/task.toml")
    (write_task(source / "sets" / "four") / "far").symlink_to(tmp_path / "secret" / "task" / "task.toml")
    (write_task(source / "sets" / "five") / "round").symlink_to("round")
    (source / "sets" / "three").symlink_to(tmp_path / "secret" / "task")
    (source / "linked").symlink_to(tmp_path / "secret")
    url, commit = source.as_uri(), committed(source)
    with pytest.raises(ConfigError, match="two/outer is a link out of the task's folder"):
        fetched(url, commit, ["sets/two", "sets/one"])
    assert fetched(url, commit, ["sets/one"])[0].joinpath("inner").is_symlink()
    for path, words in {
        "sets/two": "two/outer is a link out of",
        "sets/four": "four/far is a link out of",
        "sets/five": "five/round is a link out of",
        "sets/three": "has no folder sets/three",
        "linked/task": "has no folder linked/task",
    }.items():
        with pytest.raises(ConfigError, match=words):
            fetched(url, commit, [path])


def test_files_that_git_lfs_keeps_are_named(source: Path) -> None:
    (source / "sets" / "one" / "data.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(ConfigError, match=r"sets/one/data\.bin is kept by git-lfs"):
        fetched(source.as_uri(), committed(source), ["sets/one"])


def test_no_hook_runs_and_names_are_no_patterns(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(source / "sets" / "on[e] #*")
    commit = committed(source)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/harm\n")
        (hooks / name).chmod(0o755)
    (tmp_path / "config").write_text(f"[core]\nhooksPath = {hooks}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "not-this-one"))
    (found,) = fetched(source.as_uri(), commit, ["sets/on[e] #*"])
    assert (found / "task.toml").is_file()
    assert not (found.parent / "one").exists()
    assert not (tmp_path / "harm").exists()


# ---- fetches that meet, and that are killed --------------------------------------------------------------------------


def test_several_fetch_the_same_at_once(source: Path) -> None:
    url, commit = source.as_uri(), committed(source)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: fetched(url, commit, ["sets/one", "sets/two"]), range(3)))
    assert found[0] == found[1] == found[2]
    assert all((folder / "task.toml").is_file() for folder in found[0])
    assert not list(cache_folder().rglob(".fetching-*"))


@pytest.mark.slow
def test_a_killed_fetch_leaves_no_half_task(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, commit = source.as_uri(), committed(source)
    wrapper = tmp_path / "bin" / "git"
    wrapper.parent.mkdir()
    real = subprocess.run(["sh", "-c", "command -v git"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper.write_text(f'#!/bin/sh\n{real} "$@" || exit 1\ncase "$*" in *checkout*) kill -9 $PPID;; esac\n')
    wrapper.chmod(0o755)
    call = (
        f"from agentlightning.environments.harbor.repository import fetched; fetched({url!r}, {commit!r}, ['sets/one'])"
    )
    killed = subprocess.run(
        [sys.executable, "-c", call],
        env={**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    (left,) = cache_folder().rglob(".fetching-*")
    assert (left / "sets" / "one" / "task.toml").is_file()
    assert not list(cache_folder().glob(f"*/{commit}/sets"))
    os.utime(left, (0, 0))
    (found,) = fetched(url, commit, ["sets/one"])
    assert (found / "task.toml").is_file()
    assert not left.exists()


def test_no_git_says_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, commit = source.as_uri(), committed(source)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="apt-get install git"):
        fetched(url, commit, ["sets/one"])


# ---- a registry at a URL ---------------------------------------------------------------------------------------------


@contextmanager
def serving(answers: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """The URL of a server that gives these answers by path."""

    class _Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Location", "/registry.json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_registry_at_a_url_is_read_and_kept_for_when_it_is_not_there(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "gitconfig"
    settings.write_text(f'[url "{source.as_uri()}"]\n\tinsteadOf = https://example.org/tasks\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    body = json.dumps([entry("https://example.org/tasks", committed(source), "one")]).encode()
    answers = {"/registry.json": (200, body), "/moved.json": (302, b""), "/page": (200, b"<html>")}
    with serving(answers) as url:
        assert names_of("harbor:mine", registry_url=f"{url}/registry.json") == ["tests/one"]
        for name, words in {
            "missing": "it answers 404",
            "moved.json": "redirects are not followed",
            "page": "is no JSON",
        }.items():
            with pytest.raises(ConfigError, match=words):
                names_of("harbor:mine", registry_url=f"{url}/{name}")
        answers["/registry.json"] = (200, b"<html>")
        with pytest.raises(ConfigError, match="is no JSON"):
            names_of("harbor:mine", registry_url=f"{url}/registry.json")
    assert names_of("harbor:mine", registry_url=f"{url}/registry.json") == ["tests/one"]
    assert "The copy that was read 0 hours ago is taken" in caplog.text
    with pytest.raises(ConfigError, match=r"nothing listens at 127.0.0.1:\d+. A registry in a file needs no network"):
        names_of("harbor:mine", registry_url=f"{url}/other.json")


async def test_a_registry_at_a_url_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    write_task(tmp_path / "task")
    tasks = [{"name": "one", "path": str(tmp_path / "task")}]
    body = json.dumps([{"name": "mine", "version": "1", "tasks": tasks}]).encode()
    with serving({"/r": (200, body)}) as url, pytest.raises(ConfigError, match="no folder is at a URL"):
        names_of("harbor:mine", registry_url=f"{url}/r")  # with an event loop that runs, too


def test_a_registry_at_a_url_names_no_repository_of_this_machine(source: Path) -> None:
    body = json.dumps([entry(source.as_uri(), committed(source), "one")]).encode()
    with serving({"/r": (200, body)}) as url, pytest.raises(ConfigError, match="a repository of this machine"):
        names_of("harbor:mine", registry_url=f"{url}/r")


# ---- dataset.toml ----------------------------------------------------------------------------------------------------


def listing(folder: Path, **digests: str) -> None:
    tasks = "".join(f'[[tasks]]\nname = "tests/{name}"\ndigest = "{digest}"\n' for name, digest in digests.items())
    (folder / "dataset.toml").write_text(f'[dataset]\nname = "tests/all"\n{tasks}')


def test_tasks_that_a_folder_lists_have_to_be_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = write_task(tmp_path / "tasks" / "one", files={"tests/data/x": "x", "solution/__pycache__/y": "y"})
    write_task(tmp_path / "tasks" / "two")
    digest = digest_of(one)
    assert digest is not None
    listing(tmp_path / "tasks", one=digest)
    assert names_of(f"harbor:{tmp_path}/tasks") == ["tests/one", "tests/two"]
    (one / "solution" / "__pycache__" / "y").write_text("z")
    assert digest_of(one) == digest
    assert not caplog.text
    (one / "tests" / "data" / "x").rename(one / "tests" / "data" / "z")
    assert names_of(f"harbor:{tmp_path}/tasks") == ["tests/one", "tests/two"]
    assert "changed since they were listed: tests/one" in caplog.text
    (one / "tests" / ".gitignore").write_text("data\n")
    assert digest_of(one) is None
    listing(tmp_path / "tasks", three=digest)
    with pytest.raises(ConfigError, match=r"dataset\.toml lists tests/three, and there is no such task"):
        names_of(f"harbor:{tmp_path}/tasks")
    for text, words in {"[dataset": "cannot be read", "[[tasks]]\nname='a'\ndigest='b'": "dataset: this key"}.items():
        (tmp_path / "tasks" / "dataset.toml").write_text(text)
        with pytest.raises(ConfigError, match=words):
            names_of(f"harbor:{tmp_path}/tasks")


def test_a_digest_is_harbors(tmp_path: Path) -> None:
    """What the packager of harbor 0.25.0 says of this folder."""
    for name, text in {
        "task.toml": '[task]\nname = "tests/one"\n',
        "instruction.md": "Do it.",
        "README.md": "r",
        "notes.txt": "n",
        "environment/Dockerfile": "FROM x\n",
        "tests/test.sh": "#!/bin/sh\n",
        "tests/data/x": "x",
        "tests/data.txt": "d",
        "solution/__pycache__/y": "y",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests" / "link").symlink_to("data.txt")
    (tmp_path / "tests" / "folder").symlink_to("data")
    assert digest_of(tmp_path) == "sha256:4ae0f072fcf0c0adcd20125b81940dce02ddffba50124f8fdd331844a7dc84de"
