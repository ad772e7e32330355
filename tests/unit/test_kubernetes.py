"""`raypar cluster kubernetes` prints what KubeRay accepts, or all mistakes at once. No cluster is involved."""

import base64
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from raypar.cli import kubernetes as command
from raypar.cli.app import app
from raypar.errors import RayparError
from raypar.execution.flags import all_flags
from raypar.run import kubernetes
from raypar.run.jobs import words_on_head
from raypar.run.kubernetes import MAX_NAME, RayJob, bytes_of, files_of, manifest, name_for

sys.path.insert(0, str(Path(__file__).parents[1]))

from kuberay import problems

STUDY = """\
from helper import RATE
from raypar import Study, grid
from raypar.workloads import digits

study = Study(workload=digits, space={"lr": grid(RATE, 0.2)}, num_repeats=1)
"""
IMAGE = "registry.example.com/team/raypar:0.1.0"
JOB = RayJob(
    name="batch-size",
    namespace="",
    image=IMAGE,
    num_workers=4,
    gpus_per_worker=0,
    cpus_per_worker=4,
    memory_per_worker="16Gi",
    workers_per_node=1,
    volume="results",
    data_volume="",
    ttl_s=600,
)
FILES = {"batch_size.py": b"# a study\n"}


def documents(job=JOB, study="batch_size", file="batch_size.py", files=FILES, flags=(), environment=None):
    """Return a manifest's text, ConfigMap and RayJob, as a reader of YAML sees them."""
    text = manifest(job, study, file, files, flags, environment or {}, "2.60.0")
    config_map, ray_job = yaml.safe_load_all(text)
    assert (config_map["kind"], ray_job["kind"]) == ("ConfigMap", "RayJob")
    return text, config_map, ray_job


def pods(ray_job):
    """Return the pods of the head and of each group of workers."""
    cluster = ray_job["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "s.py").write_text(STUDY)
    (tmp_path / "helper.py").write_text("RATE = 0.1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["cluster", "kubernetes", *arguments])


ODD = "\ufeff#\x85\u2028\r\n\t'\"$`\\ "
texts = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(ODD)), min_size=1)
jobs = st.builds(
    lambda per_node, groups, **fields: RayJob(workers_per_node=per_node, num_workers=per_node * groups, **fields),
    per_node=st.integers(1, 4),
    groups=st.integers(1, 64),
    name=st.from_regex(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", fullmatch=True),
    namespace=st.sampled_from(["", "ml", "team-1"]),
    image=st.sampled_from([IMAGE, "raypar", f"host:5000/raypar@sha256:{'0' * 64}"]),
    gpus_per_worker=st.integers(0, 8),
    cpus_per_worker=st.integers(1, 192),
    memory_per_worker=st.sampled_from(["1Gi", "64Gi", "1.5Ti", "1536Mi", "64G", "2000000000"]),
    volume=st.sampled_from(["", "results", "team.results-1"]),
    data_volume=st.sampled_from(["", "data"]),
    ttl_s=st.integers(0, 10**6),
)


@given(jobs, texts, st.lists(texts, max_size=3))
def test_kuberay_accepts_every_manifest(job, text, flags):
    assert not list(job.mistakes())
    _, config_map, ray_job = documents(job, files={"s.py": text.encode()}, flags=flags)
    data = ["--data-dir", "/data"] if job.data_volume else []
    assert list(problems(ray_job)) == []
    texts, rest = config_map.get("data", {}), config_map.get("binaryData", {})
    stored = {key: value.encode() for key, value in texts.items()} | {k: base64.b64decode(v) for k, v in rest.items()}
    assert all(re.fullmatch("[-._a-zA-Z0-9]{1,253}", key) for key in stored)
    assert stored["1-s.py"] == text.encode()
    words = words_on_head("--min-nodes", str(1 + job.num_workers), *data, *flags)
    assert stored["start.sh"].decode().endswith(f" {words}\n")
    assert ray_job["metadata"] == config_map["metadata"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda job: job["spec"].update(entryPoint="x"), "entryPoint"),
        (lambda job: job["spec"].update(ttlSecondsAfterFinished="600"), "'600' is not of type 'integer'"),
        (lambda job: pods(job)[1].update(volumes=[{"emptyDir": {}}]), "'name' is a required property"),
        (lambda job: pods(job)[1]["containers"][0].update(resource={}), "resource"),
        (lambda job: job["metadata"].update(name="a" * 48), "DNS label"),
        (lambda job: job["spec"].update(shutdownAfterJobFinishes=False), "without shutdownAfterJobFinishes"),
        (lambda job: job["spec"]["rayClusterSpec"].update(rayVersion=""), "token"),
        (lambda job: pods(job)[0].update(restartPolicy="Always"), "restarts"),
        (lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update(labels="a=b"), "labels"),
    ],
)
def test_the_check_finds_what_kuberay_refuses(change, problem):
    _, _, ray_job = documents()
    change(ray_job)
    assert any(problem in each for each in problems(ray_job))


def test_pods_have_guaranteed_resources_and_whole_cpus():
    job = replace(JOB, gpus_per_worker=8, cpus_per_worker=16, memory_per_worker="64Gi")
    _, _, ray_job = documents(job)
    head, worker = pods(ray_job)
    for container in (*head["initContainers"], *head["containers"], *worker["initContainers"], *worker["containers"]):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"] and {"cpu", "memory"} <= resources["limits"].keys()
        assert container["image"] == IMAGE
    assert worker["containers"][0]["resources"]["limits"] == {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "8"}
    (shared,) = (volume for volume in worker["volumes"] if volume["name"] == "shm")
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "32768Mi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in worker["containers"][0]["volumeMounts"]
    assert "nvidia.com/gpu" in str(worker["tolerations"]) and "tolerations" not in pods(documents()[2])[1]
    head_group = ray_job["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head_group["rayStartParams"]["num-cpus"] == "0", "the head trains nothing"


def terms(pod, kind):
    return [
        (term["labelSelector"]["matchLabels"], term["topologyKey"])
        for term in pod["affinity"].get(kind, {}).get("requiredDuringSchedulingIgnoredDuringExecution", ())
    ]


@pytest.mark.parametrize(("num_workers", "per_node"), [(4, 1), (4, 2), (6, 3), (3, 3)])
def test_each_node_gets_the_stated_number_of_workers(num_workers, per_node):
    """A node has at most one pod of each group, and those of the other groups only where one of the first is."""
    _, _, ray_job = documents(replace(JOB, num_workers=num_workers, workers_per_node=per_node))
    groups = ray_job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert len(groups) == per_node
    labels = [group["template"]["metadata"]["labels"] for group in groups]
    assert len({json.dumps(each) for each in labels}) == per_node, "each group is told from the others"
    for group, own in zip(groups, labels, strict=True):
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == num_workers // per_node
        pod = group["template"]["spec"]
        assert terms(pod, "podAntiAffinity") == [(own, "kubernetes.io/hostname")]
        assert terms(pod, "podAffinity") == ([] if own == labels[0] else [(labels[0], "kubernetes.io/hostname")])


def test_results_are_in_the_claim_and_all_pods_have_the_study_and_the_data():
    _, config_map, ray_job = documents(replace(JOB, data_volume="mnist"), files={**FILES, "parts/net.py": b"x = 1\n"})
    head, worker = pods(ray_job)
    assert {"name": "results", "persistentVolumeClaim": {"claimName": "results"}} in head["volumes"]
    assert "results" not in str(worker["volumes"])
    for pod in (head, worker):
        by_name = {volume["name"]: volume for volume in pod["volumes"]}
        items = by_name["files"]["configMap"]["items"]
        assert by_name["files"]["configMap"]["name"] == config_map["metadata"]["name"]
        assert {item["path"] for item in items} == {"start.sh", "study/batch_size.py", "study/parts/net.py"}
        assert {item["key"] for item in items} == config_map["data"].keys()
        paths = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert paths["study"] == "/study" and paths["data"] == "/data" and paths.keys() == by_name.keys()
        assert by_name["data"]["persistentVolumeClaim"] == {"claimName": "mnist", "readOnly": True}
        assert {mount["name"] for mount in pod["initContainers"][0]["volumeMounts"]} == {"files", "study"}
    assert "--data-dir /data" in config_map["data"]["start.sh"]


def test_the_init_container_copies_the_files_as_kubernetes_links_them(tmp_path):
    _, _, ray_job = documents()
    mounted, study = tmp_path / "raypar", tmp_path / "study"
    (real := mounted / "..2026_11_29" / "study" / "parts").mkdir(parents=True)
    (real / "net.py").write_text("x = 1\n")
    (mounted / "..data").symlink_to("..2026_11_29")
    (mounted / "study").symlink_to("..data/study")
    study.mkdir()
    shell, option, line = pods(ray_job)[0]["initContainers"][0]["command"]
    line = line.replace("/raypar/", f"{mounted}/").replace(" /study/", f" {study}/")
    subprocess.run([shell, option, line], check=True)
    assert [str(path.relative_to(study)) for path in study.rglob("*")] == ["parts", "parts/net.py"]
    assert not (study / "parts").is_symlink()


def test_the_head_waits_for_all_pods_and_runs_the_study_in_the_claim(tmp_path):
    """KubeRay pastes the entrypoint into a shell line, and Ray into another: neither must change a word."""
    flags = ["--set", "x='; rm -rf / #", "--set", 'y="$HOME`id`"', "--data-dir", "~/my data", "--set", "z=a\\b\nc"]
    study, environment = "my study's", {"RAYPAR_CODE_ORIGIN": '{"folder": "/it\'s"}'}
    _, config_map, ray_job = documents(study=study, file="my study.py", flags=flags, environment=environment)
    entrypoint = ray_job["spec"]["entrypoint"]
    assert re.fullmatch(r"bash [\w./-]+", entrypoint) and entrypoint.split()[1] == "/raypar/start.sh"
    programs = {"python": "cat >>$LOG", "raypar": 'printf "%s\\0" "$PWD" "$RAYPAR_CODE_ORIGIN" "$@"'}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    script = config_map["data"]["start.sh"].replace("/results/", f"{tmp_path}/results/")
    log = tmp_path / "log"
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/me", "LOG": str(log)}
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=True)
    folder, origin, *words = done.stdout.split("\0")[:-1]
    assert folder == str(tmp_path / "results" / study) and origin == environment["RAYPAR_CODE_ORIGIN"]
    given = [word.replace("~", "/home/me") for word in flags]
    shown = ["study", "/study/my study.py", "--address", "auto", "--exclusive", "--min-nodes", "5", *given]
    assert words == shown
    compile(log.read_text(), "waits", "exec")
    assert "< 5:" in log.read_text(), "the four workers and the head"


def test_the_command_prints_the_study_with_the_files_beside_it_and_its_flags(folder):
    done = run("s.py", "--image", IMAGE, "--workers", "2", "--volume", "v", "--set", "epochs=2", "--seed", "3")
    assert done.exit_code == 0, done.output
    config_map, ray_job = yaml.safe_load_all(done.stdout)
    assert list(problems(ray_job)) == [] and ray_job["metadata"]["name"] == "s"
    data = config_map["data"]
    assert {key: data[key] for key in data if key != "start.sh"} == {
        "1-helper.py": (folder / "helper.py").read_text(),
        "2-s.py": STUDY,
    }
    assert (
        data["start.sh"]
        .splitlines()[-1]
        .endswith("/study/s.py --address auto --exclusive --min-nodes 3 --set epochs=2 --seed 3")
    )
    assert "kubectl replace --force -f -" in data["start.sh"] and '"folder"' in data["start.sh"]


def test_every_flag_that_can_be_submitted_is_taken_but_those_that_the_job_gives():
    left_out = {flag.name for flag in all_flags()} - {*command.ON_CLUSTER}
    assert left_out == {"dry_run", "no_ray", "address", "share_machine", "exclusive", "min_nodes", "repeat_best"}


@pytest.mark.usefixtures("folder")
def test_all_mistakes_are_reported_at_once():
    done = run("s.py", *shlex.split("--workers 3 --workers-per-node 2 --name A_B --set lr=-1 --data-dir data --ttl -1"))
    assert done.exit_code == 2
    for text in (
        "7 mistakes",
        "--image: missing",
        "--name A_B: must be a name of Kubernetes",
        "--ttl -1: must be at least 0",
        "--workers 3 can't be divided among nodes of 2\n      → write --workers 4",
        "--volume: missing",
        "--data-dir data: must be a folder of the cluster's head",
        "--set lr = -1",
    ):
        assert text in done.stderr, text
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("image", "", "--image: missing"),
        ("image", "My Image", "must be an image's name"),
        ("image", "a;b", "must be an image's name"),
        ("name", "9lives", "a letter first"),
        ("name", "a" * (MAX_NAME + 1), f"at most {MAX_NAME} characters"),
        ("name", "ends-", "must be a name of Kubernetes"),
        ("namespace", "a.b", "--namespace a.b"),
        ("volume", "my_claim", "--volume my_claim"),
        ("data_volume", "a/b", "--data-volume a/b"),
        ("num_workers", 0, "--workers 0: must be at least 1"),
        ("gpus_per_worker", -1, "--gpus-per-worker -1"),
        ("cpus_per_worker", 0, "--cpus-per-worker 0"),
        ("workers_per_node", 0, "--workers-per-node 0"),
        ("workers_per_node", 3, "--workers 4 can't be divided"),
        ("ttl_s", -5, "--ttl -5"),
        ("memory_per_worker", "64GB", "must be a quantity of Kubernetes"),
        ("memory_per_worker", "64 Gi", "must be a quantity of Kubernetes"),
        ("memory_per_worker", "9" * 400, "must be a quantity of Kubernetes"),
        ("memory_per_worker", "512Mi", "at least 1Gi"),
        ("memory_per_worker", "64", "at least 1Gi"),
    ],
)
def test_a_value_that_kubernetes_would_refuse_is_named(field, value, words):
    assert list(JOB.mistakes()) == []
    (mistake,) = replace(JOB, **{field: value}).mistakes()
    assert words in str(mistake) and mistake.hint


@pytest.mark.usefixtures("folder")
def test_a_study_that_never_fits_on_the_pods_is_refused():
    few = ("s.py", "--image", IMAGE, "--workers", "2", "--cpus-per-worker", "2", "--volume", "v")
    done = run(*few, "--set", "num_workers=8")
    assert done.exit_code == 2 and "needs 8 CPUs in one gang, the cluster has 4" in done.stderr
    assert "or raise --workers" in done.stderr and "--address" not in done.stderr
    done = run(*few, "--set", "device=cuda")
    assert done.exit_code == 2 and "GPU" in done.stderr
    assert run(*few, "--set", "device=cuda", "--gpus-per-worker", "1").exit_code == 0


@pytest.mark.usefixtures("folder")
def test_results_need_a_claim_or_a_server_without_a_password():
    with_image = ("s.py", "--image", IMAGE)
    assert "--volume: missing" in run(*with_image).stderr
    assert run(*with_image, "--tracking-uri", "http://mlflow:5000").exit_code == 0
    done = run(*with_image, "--tracking-uri", "http://me:secret-word@mlflow:5000")
    assert done.exit_code == 2 and "secret-word" not in done.output and "Secret" in done.stderr


def test_files_that_a_submission_leaves_behind_are_not_in_the_manifest(folder, monkeypatch):
    for name, text in {"secret.pem": "x", ".env": "x", "logs.txt": "x", ".rayignore": "logs.txt\n"}.items():
        (folder / name).write_text(text)
    (folder / "venv").mkdir()
    (folder / "venv" / "pyvenv.cfg").touch()
    (folder / "parts").mkdir()
    (folder / "parts" / "net.py").write_text("x = 1\n")
    assert files_of(folder / "s.py").keys() == {"s.py", "helper.py", "parts/net.py"}
    (folder / ".train_study.py").write_text("y")
    assert ".train_study.py" in files_of(folder / ".train_study.py"), "the hidden study of a script"
    with (folder / "job.yaml").open("w") as output:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output.buffer))
        assert "job.yaml" not in files_of(folder / "s.py"), "the output itself"
        sys.stdout.detach()


def test_files_too_large_for_a_manifest_are_named(folder):
    (folder / "data.bin").write_bytes(bytes(kubernetes.MAX_FILES_BYTES))
    with pytest.raises(RayparError, match=r"a manifest holds 1.00 MB: data.bin \(1.00 MB\), s.py") as error:
        files_of(folder / "s.py")
    assert ".rayignore" in error.value.hint


@pytest.mark.parametrize(
    ("study", "name"),
    [("batch_size", "batch-size"), ("LR Sweep!", "lr-sweep"), ("2x", "study-2x"), ("数据", "study"), ("_a_", "a")],
)
def test_a_study_without_a_valid_name_gets_one(study, name):
    assert name_for(study) == name


@given(st.text())
def test_any_study_has_a_name_that_kuberay_accepts(study):
    assert list(replace(JOB, name=name_for(study)).mistakes()) == []


def test_a_quantity_has_the_units_of_kubernetes():
    assert [bytes_of(text) for text in ("1Ki", "1k", "1.5Gi", "3", "1Pi", "1e3")] == [
        1024,
        1000,
        1.5 * 2**30,
        3,
        None,
        None,
    ]
