"""Kubernetes: manifests as the CRDs have them, and what a pod runs, run as in a pod.

Not run: a cluster, the operators (Kubeflow Trainer, Training Operator), the build of the image.
"""

import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from benchmarks.common import free_ports
from tests.conftest import ROOT, bake
from tests.project.test_life import PACKAGE, TINY, finish, make_slow, manifest, records, start

Manifest = dict[str, Any]
STEPS = 60


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = bake(tmp_path_factory.mktemp("kubernetes"), cluster="kubernetes", tracker="none")
    make_slow(project)
    launch = project / "src" / PACKAGE / "distributed/launch.py"
    patient, hasty = (f"EXIT_SECONDS = {seconds}\n" for seconds in (30, 10))
    assert patient in launch.read_text("utf-8")
    launch.write_text(launch.read_text("utf-8").replace(patient, hasty), "utf-8")
    (project / "text").write_text("Was ever woman in this humour wooed? " * 100)
    return project


@pytest.fixture(scope="module")
def manifests(project: Path) -> dict[str, Manifest]:
    """All of them, by their kind."""
    texts = [path.read_text("utf-8") for path in project.glob("[!.]*.yaml")]
    found = [manifest for text in texts for manifest in yaml.safe_load_all(text)]
    return {manifest["kind"]: manifest for manifest in found}


def check(manifest: Manifest) -> None:
    """As a cluster that refuses what it does not know."""
    schema = json.loads(
        (ROOT / f"tests/cluster/schemas/{manifest['kind']}.json").read_text("utf-8")
    )
    jsonschema.Draft202012Validator(schema).validate(manifest)


def pod(manifest: Manifest) -> Manifest:
    """The template of its pods."""
    if manifest["kind"] == "PyTorchJob":
        return manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (job,) = manifest["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def test_manifests_are_what_the_published_schemas_say(manifests: dict[str, Manifest]) -> None:
    """Schemas of Trainer v2.3.0 and v1.9.4; tests/cluster/schemas/trim.py cuts them anew."""
    kinds = {"TrainingRuntime", "TrainJob", "PyTorchJob"}
    assert set(manifests) == kinds | {"PersistentVolumeClaim"}
    for kind in kinds:
        check(manifests[kind])


def test_one_process_needs_one_pod_with_one_gpu(tmp_path: Path) -> None:
    """Nothing there speaks of ranks, torchrun or an entrypoint; the image starts Python itself."""
    single = bake(tmp_path, cluster="kubernetes", parallelism="single")
    texts = {
        path.name: path.read_text("utf-8")
        for path in [*single.glob("[!.]*.yaml"), single / "Dockerfile"]
    }
    assert not (single / "entrypoint.sh").exists()
    for name, text in texts.items():
        words = ("torchrun", "launch.sh", "entrypoint", "NCCL", "machines", "replicas: 4")
        assert not [word for word in words if word in text], name
    found = {m["kind"]: m for n in texts if n != "Dockerfile" for m in yaml.safe_load_all(texts[n])}
    for kind in ("TrainingRuntime", "TrainJob", "PyTorchJob"):
        check(found[kind])
    (replicas,) = found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values()
    assert replicas["replicas"] == found["TrainJob"]["spec"]["trainer"]["numNodes"] == 1
    for template in (pod(found["TrainingRuntime"]), replicas["template"]["spec"]):
        assert template["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert json.loads(dockerfile(single)["ENTRYPOINT"]) == ["python", "-m", PACKAGE]


def _misspell(pod: Manifest) -> None:
    pod["terminationGracePeriod"] = pod.pop("terminationGracePeriodSeconds")


def _mistype(pod: Manifest) -> None:
    pod["terminationGracePeriodSeconds"] = "3m"


def _forget(pod: Manifest) -> None:
    del pod["containers"][0]["name"]


def _misquote(pod: Manifest) -> None:
    pod["containers"][0]["resources"]["limits"]["memory"] = "256 GB"


@pytest.mark.parametrize("spoil", [_misspell, _mistype, _forget, _misquote])
@pytest.mark.parametrize("kind", ["TrainingRuntime", "PyTorchJob"])
def test_a_wrong_manifest_is_refused(
    manifests: dict[str, Manifest], kind: str, spoil: Callable[[Manifest], None]
) -> None:
    spoiled = copy.deepcopy(manifests[kind])
    spoil(pod(spoiled))
    with pytest.raises(jsonschema.ValidationError):
        check(spoiled)


def test_names_fit_together(manifests: dict[str, Manifest], tmp_path: Path) -> None:
    """Runtime, job and claim; and they are DNS labels (RFC 1035) with any slug."""
    long = bake(tmp_path, cluster="kubernetes", project_slug="0_" + "a" * 38)
    texts = [path.read_text("utf-8") for path in long.glob("[!.]*.yaml")]
    others = {m["kind"]: m for text in texts for m in yaml.safe_load_all(text)}
    for found in (manifests, others):
        name = found["TrainJob"]["metadata"]["name"]
        assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == name
        assert found["TrainingRuntime"]["metadata"]["name"] == name
        assert found["PyTorchJob"]["metadata"]["name"] == name
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        assert len(f"{name}-node-0-999") <= 63  # the name of a pod's host
        for kind in ("TrainingRuntime", "PyTorchJob"):
            claims = [v.get("persistentVolumeClaim") for v in pod(found[kind])["volumes"]]
            claim = found["PersistentVolumeClaim"]["metadata"]["name"]
            assert {"claimName": claim} in claims


@pytest.mark.parametrize("kind", ["TrainingRuntime", "PyTorchJob"])
def test_pods_are_confined_and_have_time_to_save(
    project: Path, manifests: dict[str, Manifest], kind: str
) -> None:
    template = pod(manifests[kind])
    (container,) = template["containers"]
    assert container["name"] == {"TrainingRuntime": "node", "PyTorchJob": "pytorch"}[kind]
    grace = re.search(r"GRACE_SECONDS:-(\d+)", (project / "launch.sh").read_text("utf-8"))
    assert grace and template["terminationGracePeriodSeconds"] > int(grace[1])
    assert template["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in template["volumes"]}
    assert mounts.keys() == {"/app/runs", "/dev/shm", "/tmp"}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert container["resources"]["limits"]["nvidia.com/gpu"]
    if kind == "PyTorchJob":
        policy = manifests[kind]["spec"]["elasticPolicy"]
        replicas = manifests[kind]["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
        assert policy["minReplicas"] < policy["maxReplicas"] == replicas


def dockerfile(project: Path) -> dict[str, str]:
    """Its instructions, the last of each; lines that go on are joined."""
    text = (project / "Dockerfile").read_text("utf-8").replace("\\\n", "")
    lines = [line.split(" ", 1) for line in text.splitlines() if line and line[0] not in "# "]
    return {word: rest for word, rest in lines}


def test_image_is_what_the_manifests_expect(
    project: Path, manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    image = dockerfile(project)
    (entrypoint,) = json.loads(image["ENTRYPOINT"])
    assert os.access(project / entrypoint, os.X_OK)
    assert image["WORKDIR"] == "/app"
    for kind in ("TrainingRuntime", "PyTorchJob"):
        assert str(pod(manifests[kind])["securityContext"]["runAsUser"]) == image["USER"]
    ignored = (project / ".dockerignore").read_text("utf-8").split()
    assert not {"scripts", "src", "pyproject.toml"} & {*ignored} and {"runs", ".git"} <= {*ignored}
    requirements = requirements_of(project)
    assert {"torch>=2.9", "tyro>=0.9.2"} <= requirements
    assert not any(line.startswith("s3fs") for line in requirements)


def requirements_of(project: Path) -> set[str]:
    """What the image installs, by the program in its Dockerfile."""
    (program,) = re.findall(r'python -c "([^"]+)"', (project / "Dockerfile").read_text("utf-8"))
    with start(project, sys.executable, "-c", program) as process:
        return set(finish(process).splitlines())


def test_the_image_has_the_client_of_an_object_store(tmp_path: Path) -> None:
    project = bake(tmp_path, cluster="kubernetes", storage="object_store")
    requirements = requirements_of(project)
    assert "torch>=2.9" in requirements
    assert any(line.startswith("s3fs") for line in requirements)


class Pods:
    """Pods of a job, as far as Linux without a cluster can have them."""

    def __init__(self, project: Path, folder: Path) -> None:
        self.project, self.root, self.runs = project, folder / "root", folder / "runs"
        for path in (self.root, self.runs):
            path.mkdir()
        os.chown(self.runs, 1000, 1000)

    @contextlib.contextmanager
    def start(self, name: str, *command: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """A pod with the variables of the image, and these."""
        words = dict(word.split("=", 1) for word in dockerfile(self.project)["ENV"].split())
        words |= {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": "/srv/app/src"}
        given = ["env", "-i", *(f"{name}={value}" for name, value in (words | variables).items())]
        places = map(str, (self.root, self.project, self.runs, sys.prefix))
        own = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child"]
        script = ["bash", str(ROOT / "tests/cluster/pod.sh"), name]
        with start(self.project, *own, *script, *places, *given, *command) as process:
            yield process


def own_namespaces() -> bool:
    """Whether this machine lets us have them."""
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    become = "mount --make-rprivate /; echo probe >/proc/sys/kernel/hostname; mount -t proc p /proc"
    own = ["unshare", "--uts", "--mount", "--pid", "--fork", "bash", "-ec", become]
    return not subprocess.run(own, capture_output=True, timeout=120).returncode


@pytest.mark.skipif(not own_namespaces(), reason="NOT RUN: pods need root and namespaces (Linux)")
def test_what_a_pod_runs_saves_when_it_is_evicted_and_goes_on(
    project: Path, tmp_path: Path
) -> None:
    """Two pods with the variables of Trainer v2: SIGTERM for one, all again, to the end."""
    pods = Pods(project, tmp_path)
    writes = "touch src/x || touch /etc/x || { touch runs/x /tmp/x /dev/shm/x && id -u; }"
    with pods.start("node-0", "sh", "-c", writes) as process:
        assert finish(process).splitlines()[-1] == "1000", "it can write where it should, only"

    common = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    common["OMP_NUM_THREADS"] = "1"
    (entrypoint,) = json.loads(dockerfile(project)["ENTRYPOINT"])
    command = [entrypoint, "train", *TINY, "--train.log-every", "1", "--data.path", "/srv/app/text"]
    command += ["--train.steps", str(STEPS), "--train.validate-every", "0"]
    command += ["--checkpoint.every", "10000"]

    def both(stack: contextlib.ExitStack, **more: str) -> list[subprocess.Popen[str]]:
        variables = common | more | {"PET_MASTER_PORT": str(free_ports(1)[0])}
        pairs = [variables | {"PET_NODE_RANK": rank} for rank in ("1", "0")]  # the second one waits
        return [
            stack.enter_context(pods.start(f"node-{it['PET_NODE_RANK']}", *command, **it))
            for it in pairs
        ]

    run = pods.runs / "default"
    with contextlib.ExitStack() as stack:
        second, first = both(stack, SLOW=entrypoint, SLOW_SECONDS="0.5")
        deadline = time.monotonic() + 900
        while len(records(run)) < 3:
            alive = second.poll() is None and first.poll() is None
            assert alive and time.monotonic() < deadline, first.communicate()[0]
            time.sleep(0.1)
        subprocess.run(["pkill", "-TERM", "-P", str(second.pid)], check=True)  # to its process 1
        finish(second, codes=(1, 143))
        saved = manifest(run)["step"]
        while json.loads((run / "status.json").read_text())["status"] != "preempted":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert records(run)[-1]["step"] == saved < STEPS

        assert "resuming from" in "".join(finish(process) for process in both(stack))
        finish(first)  # its torchrun has waited for the second's, though not for long
    assert [record["step"] for record in records(run)] == list(range(1, STEPS + 1))
    assert json.loads((run / "status.json").read_text())["status"] == "finished"
