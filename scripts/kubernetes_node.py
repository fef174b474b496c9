"""Builds Kubernetes from Debian's packages, runs it as a cluster of one node, and in it the tests that need one.

    python scripts/kubernetes_node.py [--folder .kubernetes] [--run COMMAND] [pytest arguments …]

`make test-kubernetes` calls this. It takes root on Debian 12, a quarter of an hour on two cores the first time, and
3.5 GB. The cluster is real: etcd, API server with the pod security policy "restricted", controllers, scheduler,
kubelet, containerd and runc. It lives in namespaces of its own (mounts, processes, network) and ends with this script;
the tests run in there too. What ends before is started again. Nothing outside is reached: an image is there
(`agent:1`, made here), or it is not to be had.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VERSION = "1.20.2"
"""The one that Debian 12 has the whole source of."""
TOOLS = [
    *("golang-1.19-go", "golang-1.19-src", "etcd-server", "containerd", "containernetworking-plugins"),
    "kubernetes-client",
]
IMAGE = [
    *("busybox-static", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libssl3"),
    *("zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5", "libuuid1"),
]
PARTS = ["kubelet", "kube-scheduler", "kube-controller-manager", "kube-apiserver"]
ADDRESS = "10.211.0.1"
"""Of the node, on the bridge that pods are connected to."""
SERVICE = "10.212.0.1"
"""Of the API server for pods. There is no kube-proxy, and no name server."""
URL = "http://127.0.0.1:8001"
"""Of the API server, behind `kubectl proxy`."""
CGROUP = "agl-kubernetes"
OPENAPI = """
set -e
go build -o {bin}/openapi-gen k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
folders=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd plugin staging/src/k8s.io | xargs -n1 dirname \
  | sort -u | grep -v -e code-generator -e sample-apiserver | sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#' \
  -e '/^k8s.io/!s#^#k8s.io/kubernetes/#' | paste -sd,)
{bin}/openapi-gen --logtostderr -i "$folders" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r {bin}/violations -o "$GOPATH/src"
"""
"""What upstream's Makefile does for the API server: the schemas of everything."""


# ---- what it is made of ----------------------------------------------------------------------------------------------


def build(folder: Path) -> None:
    """Fetch the packages, compile Kubernetes, and make the image of the pods; once."""
    stamp, wanted = folder / "made.txt", "\n".join([VERSION, *TOOLS, *IMAGE, *PARTS])
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"==> making {folder} with Kubernetes {VERSION} (a quarter of an hour)", flush=True)
    began = time.monotonic()
    folder.mkdir(exist_ok=True)
    if missing := [name for name in ("runc", "ip", "openssl") if shutil.which(name) is None]:
        packages = {"runc": "runc", "ip": "iproute2", "openssl": "openssl"}
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *(packages[m] for m in missing)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    _fetch(folder)
    _compile(folder)
    _image(folder)
    stamp.write_text(wanted)
    print(f"    done in {time.monotonic() - began:.0f} s", flush=True)


def _fetch(folder: Path) -> None:
    """Packages into `tools` and `image`, sources into `go`; the machine's own lists stay as they are."""
    apt, sources = folder / "apt", folder / "apt" / "sources"
    for part in (sources, apt / "lists" / "partial", apt / "debs", folder / "go" / "src" / "k8s.io"):
        part.mkdir(parents=True, exist_ok=True)
    for file in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("debian*")]:
        if file.exists():  # in either form
            text = re.sub(r"^deb (.*)", r"deb \1\ndeb-src \1", file.read_text(), flags=re.MULTILINE)
            (sources / file.name).write_text(text.replace("Types: deb\n", "Types: deb deb-src\n"))
    settings = {"Etc::sourcelist": "/dev/null", "Etc::sourceparts": sources, "State::lists": apt / "lists"}
    options = [f"-oDir::{name}={value}" for name, value in settings.items()]
    options += ["-qq", "-oAPT::Sandbox::User=root", f"-oDir::Cache={apt}"]
    subprocess.run(["apt-get", *options, "update"], check=True)
    subprocess.run(["apt-get", *options, "download", *TOOLS, *IMAGE], check=True, cwd=apt / "debs")
    subprocess.run(["apt-get", *options, "source", "--download-only", "kubernetes"], check=True, cwd=apt)
    for deb in (apt / "debs").glob("*.deb"):
        target = folder / ("tools" if deb.name.partition("_")[0] in TOOLS else "image")
        subprocess.run(["dpkg-deb", "-x", deb, target], check=True)
    source = folder / "go" / "src" / "k8s.io" / "kubernetes"
    if not source.exists():
        (archive,) = apt.glob("kubernetes_*.orig.tar.gz")
        subprocess.run(["tar", "-xf", archive, "-C", source.parent], check=True)
        next(source.parent.glob("kubernetes-*")).rename(source)


def _compile(folder: Path) -> None:
    source, programs = folder / "go" / "src" / "k8s.io" / "kubernetes", folder / "bin"
    programs.mkdir(exist_ok=True)
    go = folder / "tools" / "usr" / "lib" / "go-1.19"
    environment = {**os.environ, "GOROOT": str(go), "GOPATH": str(folder / "go"), "GOCACHE": str(folder / "cache")}
    environment |= {"GO111MODULE": "off", "CGO_ENABLED": "0", "PATH": f"{go / 'bin'}:{os.environ['PATH']}"}
    if not (source / "pkg" / "generated" / "openapi" / "zz_generated.openapi.go").exists():
        subprocess.run(["sh", "-c", OPENAPI.format(bin=programs)], check=True, cwd=source, env=environment)
    say = "-X k8s.io/kubernetes/vendor/k8s.io/component-base/version.git"
    flags = f"-s -w {say}Version=v{VERSION} {say}Major=1 {say}Minor=20"
    for part in PARTS:
        command = ["go", "build", "-ldflags", flags, "-o", str(programs / part), f"k8s.io/kubernetes/cmd/{part}"]
        subprocess.run(command, check=True, cwd=source, env=environment)


def _image(folder: Path) -> None:
    """Write `agent.tar` as `docker save` does: busybox and Python. It waits of itself, so it is the pause image too."""
    content, busybox = folder / "image", folder / "image" / "bin" / "busybox"
    for name in subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split():
        if not (link := content / "bin" / name).exists():
            link.symlink_to("busybox")
    if not (link := content / "usr" / "bin" / "python3").exists():
        link.symlink_to("python3.11")
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(content, "/")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    settings = {"Cmd": ["/bin/busybox", "sleep", "2147483647"], "Env": ["PATH=/usr/bin:/bin"]}
    config = {"architecture": "amd64", "os": "linux", "config": settings}
    config["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    manifest = [{"Config": "config.json", "RepoTags": ["agent:1"], "Layers": ["layer.tar"]}]
    with tarfile.open(folder / "agent.tar", "w") as tar:
        texts = {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
        for name, data in (texts | {"layer.tar": layer.getvalue()}).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


# ---- the cluster -----------------------------------------------------------------------------------------------------

TUNABLES = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
"""What a kubelet sets on its machine. It finds it set, and the machine stays as it is."""
PREPARATIONS = [
    "mount -t tmpfs tmpfs /run",
    "ip link set lo up",
    "ip link add pods address 0a:00:00:00:00:01 type bridge",  # else it takes that of a pod, until that ends
    f"ip addr add {ADDRESS}/16 dev pods",
    f"ip addr add {SERVICE}/32 dev pods",
    "ip link set pods up",
]
WRITTEN = ["opt", "usr/libexec", "var/lib", "var/log"]
"""Folders of the machine that the parts write to. They find others in their place."""
CONTAINERD = """
version = 2
root = "{run}/containerd"
[grpc]
address = "{run}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "docker.io/library/agent:1"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{folder}/tools/usr/lib/cni"
conf_dir = "{run}/cni"
"""
NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "type": "bridge",
    "bridge": "pods",
    "isDefaultGateway": True,
    "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.211.0.0/16", "gateway": ADDRESS}]]},
}
KUBELET = {
    "kind": "KubeletConfiguration",
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "address": ADDRESS,
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "cgroupRoot": f"/{CGROUP}",
    "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1Gi", "imagefs.available": "1Gi"},
    "failSwapOn": False,
    "imageGCHighThresholdPercent": 100,  # on a disk that is nearly full it would delete the only image there is
    "kubeAPIQPS": 50,
    "kubeAPIBurst": 100,
    "makeIPTablesUtilChains": False,
    "oomScoreAdj": 0,
    "resolvConf": "",
}
RESTRICTED: list[Any] = [
    {
        "apiVersion": "policy/v1beta1",
        "kind": "PodSecurityPolicy",
        "metadata": {
            "name": "restricted",
            "annotations": {"seccomp.security.alpha.kubernetes.io/allowedProfileNames": "runtime/default"},
        },
        "spec": {
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "requiredDropCapabilities": ["ALL"],
            "volumes": ["configMap", "emptyDir", "projected", "secret", "downwardAPI"],
            "runAsUser": {"rule": "MustRunAsNonRoot"},
            **{name: {"rule": "RunAsAny"} for name in ("seLinux", "supplementalGroups", "fsGroup")},
        },
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "restricted"},
        "rules": [
            {"apiGroups": ["policy"], "resources": ["podsecuritypolicies"], "verbs": ["use"]}
            | {"resourceNames": ["restricted"]}
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "restricted"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "restricted"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:serviceaccounts"}],
    },
]
"""That of the documentation of Kubernetes 1.20, but for file systems' groups, which it would set."""


def services(folder: Path) -> dict[str, list[str]]:
    run, programs, tools = folder / "run", folder / "bin", folder / "tools" / "usr" / "bin"
    config, key, gate = f"--kubeconfig={run}/admin.json", run / "accounts.pem", "--feature-gates=TTLAfterFinished=true"
    return {
        "etcd": [f"{tools}/etcd", f"--data-dir={run}/etcd", "--unsafe-no-fsync"],
        "kube-apiserver": [
            *(f"{programs}/kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--cert-dir={run}/certificates"),
            *(f"--advertise-address={ADDRESS}", "--secure-port=443", "--service-cluster-ip-range=10.212.0.0/24", gate),
            *("--authorization-mode=RBAC", f"--token-auth-file={run}/tokens.csv"),
            *("--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}"),
            *(f"--service-account-signing-key-file={key}", "--enable-admission-plugins=PodSecurityPolicy"),
            "--kubelet-preferred-address-types=InternalIP",
        ],
        "kube-controller-manager": [
            *(f"{programs}/kube-controller-manager", config, f"--service-account-private-key-file={key}", gate),
            *(f"--root-ca-file={run}/certificates/apiserver.crt", "--leader-elect=false"),
        ],
        "kube-scheduler": [f"{programs}/kube-scheduler", config, "--leader-elect=false"],
        "containerd": [f"{tools}/containerd", f"--config={run}/containerd.toml"],
        "kubelet": [
            *(f"{programs}/kubelet", config, f"--config={run}/kubelet.json", f"--root-dir={run}/kubelet"),
            *(f"--cert-dir={run}/kubelet-certificates", f"--node-ip={ADDRESS}", "--hostname-override=node"),
            *("--container-runtime=remote", f"--container-runtime-endpoint=unix://{run}/containerd.sock"),
        ],
        "kubectl": [f"{tools}/kubectl", config, "proxy", "--port=8001"],
    }


class Cluster:
    """All of it, each part started again when it ends. What one says is in `run/NAME.log`, its id in `run/NAME.pid`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._run = folder, folder / "run"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Returns when the node is ready."""
        self._prepare()
        (threading.Thread(target=self._watch, daemon=True)).start()
        self._until("the API server answers", lambda: _get("/healthz") == "ok")
        self._kubectl("apply", "-f", "-", given=json.dumps({"kind": "List", "apiVersion": "v1", "items": RESTRICTED}))
        ctr = [
            str(self._folder / "tools" / "usr" / "bin" / "ctr"),
            "-a",
            f"{self._run}/containerd.sock",
            "-n",
            "k8s.io",
        ]
        subprocess.run([*ctr, "images", "import", f"{self._folder}/agent.tar"], check=True, stdout=subprocess.DEVNULL)
        self._until("the node is ready", self._ready)

    def _prepare(self) -> None:
        for line in PREPARATIONS:
            subprocess.run(line.split(), check=True)
        shutil.rmtree(self._run, ignore_errors=True)
        (self._run / "cni").mkdir(parents=True)
        for folder in WRITTEN:
            (self._run / "machine" / folder).mkdir(parents=True)
            subprocess.run(["mount", "--bind", self._run / "machine" / folder, f"/{folder}"], check=True)
        user = {"name": "admin", "user": {"token": "admin"}}
        server = {"server": f"https://{ADDRESS}", "insecure-skip-tls-verify": True}
        context = {"name": "node", "context": {"cluster": "node", "user": "admin"}}
        clusters = [{"name": "node", "cluster": server}]
        config = {"kind": "Config", "apiVersion": "v1", "clusters": clusters, "users": [user], "contexts": [context]}
        texts = {
            "admin.json": json.dumps({**config, "current-context": "node"}),
            "tokens.csv": 'admin,admin,admin,"system:masters"\n',
            "containerd.toml": CONTAINERD.format(run=self._run, folder=self._folder),
            "cni/pods.conf": json.dumps(NETWORK),
            "kubelet.json": json.dumps(KUBELET),
        }
        for name, text in texts.items():
            (self._run / name).write_text(text)
        key = ["openssl", "genrsa", "-out", f"{self._run}/accounts.pem", "2048"]
        subprocess.run(key, check=True, capture_output=True)
        for name, value in TUNABLES.items():
            file = self._run / "tunable" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
            subprocess.run(["mount", "--bind", file, f"/proc/sys/{name}"], check=True)

    def _watch(self) -> None:
        tools = self._folder / "tools" / "usr" / "bin"
        environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
        while True:
            for name, command in services(self._folder).items():
                if name in self._processes and self._processes[name].poll() is None:
                    continue
                with (self._run / f"{name}.log").open("ab") as log:
                    made = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
                self._processes[name] = made
                (self._run / f"{name}.pid").write_text(str(made.pid))
            time.sleep(1)

    def _kubectl(self, *arguments: str, given: str) -> None:
        program = self._folder / "tools" / "usr" / "bin" / "kubectl"
        command = [str(program), f"--kubeconfig={self._run}/admin.json", f"--cache-dir={self._run}/kubectl"]
        subprocess.run([*command, *arguments], input=given.encode(), check=True, stdout=subprocess.DEVNULL)

    def _ready(self) -> bool:
        conditions = json.loads(_get("/api/v1/nodes/node")).get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _until(self, what: str, holds: Any) -> None:
        end = time.monotonic() + 120
        while not holds():
            if time.monotonic() > end:
                raise SystemExit(f"Waited two minutes until {what}: see {self._run}/*.log")
            time.sleep(0.5)


def _get(path: str) -> str:
    """The API server's answer; of no use while it does not answer."""
    try:
        with urllib.request.urlopen(URL + path, timeout=5) as response:
            return response.read().decode()
    except (OSError, urllib.error.URLError):
        return "{}"


# ---- the command -----------------------------------------------------------------------------------------------------


def enter() -> int:
    """Run this script again in namespaces of its own, and remove the cgroups that are left."""
    cgroups = [part / CGROUP for part in Path("/sys/fs/cgroup").iterdir() if (part / "tasks").exists()]
    if not cgroups:
        raise SystemExit("There are no cgroups of version 1 here, and this was made for those.")
    for cgroup in cgroups:
        cgroup.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # a cpuset begins with none
            if (cgroup / name).exists():
                (cgroup / name).write_text((cgroup.parent / name).read_text())
    apart = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
    try:
        return subprocess.run([*apart, sys.executable, *sys.argv, "--inside"], check=False).returncode
    finally:
        for part in Path("/sys/fs/cgroup").iterdir():  # runc makes them in `unified`, too
            _remove(part / CGROUP)


def _remove(cgroup: Path) -> None:
    """Once the processes in it have ended, which were killed."""
    for path, _, _ in os.walk(cgroup, topdown=False):
        for _ in range(50):
            with contextlib.suppress(OSError):
                os.rmdir(path)
                break
            time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".kubernetes")
    parser.add_argument("--run", help="a command, such as bash, in place of the tests")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    folder = options.folder.resolve()
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SystemExit("This takes root, and Debian 12.")
    if not options.inside:
        build(folder)
        return enter()
    Cluster(folder).start()
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "kubernetes",
        "tests/litagent",
        "tests/e2e",
        "tests/environments",
        *arguments,
    ]
    environment = {**os.environ, "AGL_TEST_KUBERNETES_NODE": str(folder / "run")}
    command = shlex.split(options.run) if options.run else tests
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
