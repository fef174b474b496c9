#!/usr/bin/python3
"""The little of kubectl that engine=kubernetes uses, where a pod is a folder of this machine.

Its commands run in bubblewrap with that folder as their root and this machine's programs, with no other limits. The
folder with pods is the one in which this file lies.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

PODS = Path(__file__).resolve().parent / "pods"


def main(arguments):
    with open(PODS.parent / "calls", "a") as calls:
        calls.write(json.dumps([arguments, sorted(os.environ)]) + "\n")
    command = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    options = arguments[: len(arguments) - len(command)]
    namespace = options[options.index("--namespace") + 1] if "--namespace" in options else "default"
    if options[0] == "create":
        pod = json.load(sys.stdin)
        folder = PODS / namespace / pod["metadata"]["name"]
        folder.mkdir(parents=True)
        for name in ("usr", "etc", "tmp", "proc", "dev", "app"):
            (folder / "root" / name).mkdir(parents=True)
        (folder / "pod.json").write_text(json.dumps(pod))
        return 0
    name = next(word for word in options if word.startswith("agl-harbor-"))
    folder = PODS / namespace / name
    if options[0] == "delete":
        assert "--now" in options
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    if not folder.is_dir():
        print(f'Error from server (NotFound): pods "{name}" not found', file=sys.stderr)  # noqa: T201
        return 1
    if options[0] == "get":
        json.dump({"status": status(json.loads((folder / "pod.json").read_text()))}, sys.stdout)
        return 0
    assert options[0] == "exec"
    binds = ["--bind", folder / "root", "/", "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"]
    for link in ("bin", "lib", "lib64"):
        if not (folder / "root" / link).is_symlink():
            binds += ["--symlink", f"usr/{link}", f"/{link}"]
    wrapped = ["bwrap", *binds, "--dev-bind", "/proc", "/proc", "--dev", "/dev", "--chdir", "/app", *command]
    stdin = None if "--stdin" in options else subprocess.DEVNULL
    code = subprocess.run([str(word) for word in wrapped], stdin=stdin).returncode
    if code != 0:
        print(f"command terminated with exit code {code}", file=sys.stderr)  # noqa: T201
    return code


def status(pod):
    """Of an image whose name has `missing` in it, a pod never runs."""
    if "missing" in pod["spec"]["containers"][0]["image"]:
        waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
        return {"phase": "Pending", "containerStatuses": [{"ready": False, "state": {"waiting": waiting}}]}
    return {"phase": "Running", "containerStatuses": [{"ready": True, "state": {"running": {}}}]}


sys.exit(main(sys.argv[1:]))
