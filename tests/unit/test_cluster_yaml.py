"""Ray's cluster launcher accepts cluster.yaml and cluster-local.yaml, and they expose nothing."""

import gzip
import importlib.resources
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=["cluster.yaml", "cluster-local.yaml"])
def cluster(request):
    return yaml.safe_load((REPOSITORY / request.param).read_text())


def test_ray_accepts_the_file_and_nothing_listens_to_the_world(cluster):
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(cluster))
    assert "0.0.0.0" not in str(cluster)
    assert any("--dashboard-host=127.0.0.1" in command for command in cluster["head_start_ray_commands"])
    assert "security_group" not in cluster["provider"]


def test_every_start_of_ray_requires_the_token_that_every_node_gets(cluster):
    commands = [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2
    assert all(re.search(r"RAY_AUTH_MODE=token (\S+=\S+ )*~/venv/bin/ray start", command) for command in starts)
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "chmod 700 ~/.ray && chmod 600 ~/.ray/auth_token" in cluster["setup_commands"]
    assert any("RAY_AUTH_MODE=token" in c and ".bashrc" in c for c in cluster["setup_commands"])


def test_only_the_head_has_mlflow_and_studies_find_it(cluster):
    assert cluster["head_start_ray_commands"][-1] == "~/venv/bin/python -m raypar.track.server"
    assert any("MLFLOW_TRACKING_URI=http://127.0.0.1:5000" in c for c in cluster["head_setup_commands"])
    assert "mlflow" not in str([*cluster["setup_commands"], *cluster["worker_start_ray_commands"]]).lower()


def test_nodes_install_raypar_from_the_repository(cluster):
    extras = "cluster,aws" if "available_node_types" in cluster else "cluster"
    packages = {"setup_commands": "~/raypar[train,client]", "head_setup_commands": f"~/raypar[{extras}]"}
    for commands, package in packages.items():
        *_, install = [command for command in cluster[commands] if "pip install" in command]
        assert package in shlex.split(install) and f"'{package}" not in install  # a shell doesn't expand a quoted ~
    assert cluster["file_mounts"]["~/raypar"] == "." and "docker" not in cluster


@pytest.mark.parametrize("has_gpu", [False, True])
def test_torch_and_torchvision_come_from_one_index_which_is_that_of_cpu_wheels_where_there_is_no_gpu(
    cluster, has_gpu, tmp_path
):
    for name, script in (("nvidia-smi", f"exit {1 - has_gpu}"), ("venv/bin/pip", 'printf "%s\n" "$@"')):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    (command,) = [command for command in cluster["setup_commands"] if "torchvision" in command]
    env = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    run = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True)
    train = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    wheels = [] if has_gpu else ["--index-url", "https://download.pytorch.org/whl/cpu"]
    assert run.stdout.split() == ["install", "-q", *train[:2], *wheels]


def test_on_aws_apt_waits_for_the_first_boot_and_for_other_updates(tmp_path):
    """The machine's tools are stand-ins that log their calls; the list of packages is locked at first."""
    log = tmp_path / "log"
    tools = {
        "cloud-init": "exit 2",  # it came up with warnings
        "dpkg": "exit 1",
        "sleep": ":",
        "sudo": '[ "$2" != update ] || [ "$(grep -c "sudo apt-get update" $LOG)" -ge 3 ]',
    }
    for name, script in tools.items():
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >>$LOG\n{script}\n')
        (tmp_path / name).chmod(0o755)
    commands = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())["setup_commands"]
    for command in commands:
        if re.search("cloud-init|sudo", command):
            env = {"LOG": str(log), "PATH": f"{tmp_path}:/usr/bin:/bin"}
            subprocess.run(["bash", "-c", command], env=env, capture_output=True, check=True)
    calls = log.read_text().splitlines()
    assert calls[0] == "cloud-init status --wait" and calls.count("sudo apt-get update -qq") == 3
    assert calls[-1] == "sudo apt-get -o DPkg::Lock::Timeout=600 install -qq -y python3-venv"


def test_on_aws_a_cpu_is_a_core():
    types = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())["available_node_types"]
    for name in types.keys() - {"head"}:
        cpus = types[name]["resources"]["CPU"]
        assert types[name]["node_config"]["CpuOptions"] == {"CoreCount": cpus, "ThreadsPerCore": 1}


def aws_types():
    """Return what AWS says of each instance type."""
    with importlib.resources.files("moto.ec2.resources").joinpath("instance_types.json.gz").open("rb") as packed:
        return json.loads(gzip.decompress(packed.read()))


def test_on_aws_the_instance_types_have_these_cores_and_gpus():
    file = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
    types, num_gpus = aws_types(), set()
    for name in file["available_node_types"].keys() - {file["head_node_type"]}:
        node = file["available_node_types"][name]
        of_aws = types[node["node_config"]["InstanceType"]]
        cores, gpus = of_aws["VCpuInfo"]["DefaultCores"], of_aws.get("GpuInfo", {"Gpus": []})["Gpus"]
        assert node["resources"]["CPU"] == cores and cores in of_aws["VCpuInfo"]["ValidCores"]
        assert node["resources"].get("GPU", 0) == sum(gpu["Count"] for gpu in gpus)
        num_gpus.add(node["resources"].get("GPU", 0))
        assert f"{of_aws['VCpuInfo']['DefaultVCpus']} vCPUs" in (REPOSITORY / "cluster.yaml").read_text()
    assert num_gpus == {0, 1, 8}
    p5, g6 = types["p5.48xlarge"], types["g6.48xlarge"]
    assert p5["VCpuInfo"]["DefaultCores"] == 96 and p5["GpuInfo"]["Gpus"][0]["Count"] == 8
    assert p5["NetworkInfo"]["EfaInfo"]["MaximumEfaInterfaces"] == 32
    assert g6["NetworkInfo"]["EfaSupported"] and "cluster" in g6["PlacementGroupInfo"]["SupportedStrategies"]


def test_on_aws_the_variant_in_comments_is_accepted_as_well():
    from ray.autoscaler._private.aws.config import _configure_subnets_and_groups_from_network_interfaces
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = (REPOSITORY / "cluster.yaml").read_text()
    variant, count = re.subn(r"(?m)^( {6})# (?=(Placement|NetworkInterfaces|  - |    \w+): ?)", r"\1", text)
    variant = re.sub(r"(?m)^( {6})# (?=  - DeviceIndex)", r"\1", variant)
    assert count >= 7
    config = yaml.safe_load(variant)
    validate_config(prepare_config(config))
    node = config["available_node_types"]["gpu8_worker"]["node_config"]
    assert node["Placement"] == {"GroupName": "raypar"}
    assert _configure_subnets_and_groups_from_network_interfaces(node)["SubnetIds"] == ["subnet-ID"]


def test_on_aws_the_head_trains_nothing_and_idle_nodes_cost_nothing():
    aws = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
    types = dict(aws["available_node_types"])
    for node_type in types.values():
        assert node_type["min_workers"] == 0 and 0 <= node_type["max_workers"] <= aws["max_workers"]
    assert types.pop(aws["head_node_type"])["resources"]["CPU"] == 0
    assert {"GPU" in worker["resources"] for worker in types.values()} == {True, False}
    assert aws["idle_timeout_minutes"] > 0 and not aws["provider"]["cache_stopped_nodes"]
