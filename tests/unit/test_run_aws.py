"""`ray up cluster.yaml` on a mocked AWS (moto) that enforces the policies of roles, without SSH to the nodes."""

import json
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError
from click.testing import CliRunner
from moto import mock_aws
from moto.core import set_initial_no_auth_action_count
from moto.ssm.models import ssm_backends
from ray.autoscaler._private import commands, providers
from ray.autoscaler._private.aws import config as ray_aws
from ray.autoscaler._private.aws import utils as ray_aws_utils
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.scripts.scripts import cli

CLUSTER = Path(__file__).parents[2] / "cluster.yaml"
CONFIG = yaml.safe_load(CLUSTER.read_text())
REGION = CONFIG["provider"]["region"]
WORKERS = {name: t["node_config"] for name, t in CONFIG["available_node_types"].items() if name != "head"}
IMAGES = {"canonical": "ami-0000000000000ubun", "deeplearning": "ami-0000000000000cuda"}


class Updater:
    """Stands in for Ray's updater, which sets up a node over SSH."""

    exitcode = 0
    configs = ()  # those of heads; a list in each test

    def __init__(self, file_mounts, **_):
        self.configs.append(json.loads(Path(file_mounts["~/ray_bootstrap_config.yaml"]).read_text()))

    def start(self):
        pass

    def join(self):
        pass


@pytest.fixture
def aws(tmp_path, monkeypatch):
    """Make a new account, and a home with a token; yield the token, the calls to AWS and its parameters."""
    for name, value in (("ACCESS_KEY_ID", "mine"), ("SECRET_ACCESS_KEY", "mine"), ("DEFAULT_REGION", REGION)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where Ray caches configs
    monkeypatch.setattr(ray_aws, "time", SimpleNamespace(sleep=lambda _: None))  # until IAM has heard of a role
    # moto's list of all instance types takes it 25 s.
    monkeypatch.setattr(AWSNodeProvider, "fillout_available_node_types_resources", staticmethod(lambda config: config))
    monkeypatch.setattr(commands, "NodeUpdaterThread", Updater)
    monkeypatch.setattr(Updater, "configs", [])
    token = tmp_path / ".ray/auth_token"
    token.parent.mkdir()
    token.write_text("token")
    with mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        forget_clients()
        parameters = ssm_backends["123456789012"][REGION]._parameters  # AWS's own can't be put
        for node_config in WORKERS.values():
            name = node_config["ImageId"].removeprefix("resolve:ssm:")
            boto3.client("ssm").put_parameter(Name="image", Value=IMAGES[name.split("/")[3]], Type="String")
            (parameter,) = parameters[name] = parameters.pop("image")
            parameter.name = name
        calls = []
        boto3.setup_default_session()
        boto3.DEFAULT_SESSION.events.register("provide-client-params.*", lambda model, **_: calls.append(action(model)))
        yield SimpleNamespace(token=token, calls=calls, parameters=parameters)
    forget_clients()
    boto3.DEFAULT_SESSION = None


def action(operation):
    return f"{operation.service_model.service_name}:{operation.name}"


def forget_clients():
    ray_aws_utils.resource_cache.cache_clear()
    ray_aws_utils.client_cache.cache_clear()
    providers._clear_provider_cache()


def ray(*arguments):
    done = CliRunner().invoke(cli, [*arguments, "--yes", str(CLUSTER)], catch_exceptions=False)
    return done.exit_code, done.output


def up():
    code, output = ray("up")
    assert code == 0, output


def instances():
    reservations = boto3.client("ec2").describe_instances()["Reservations"]
    return [each for r in reservations for each in r["Instances"] if each["State"]["Name"] == "running"]


@contextmanager
def role_of_head(monkeypatch):
    """Use the credentials and rights of the head's role."""
    (head,) = instances()
    (role,) = boto3.client("iam").get_instance_profile(
        InstanceProfileName=head["IamInstanceProfile"]["Arn"].split("/")[-1]
    )["InstanceProfile"]["Roles"]
    credentials = boto3.client("sts").assume_role(RoleArn=role["Arn"], RoleSessionName="head")["Credentials"]
    names = {"AccessKeyId": "ACCESS_KEY_ID", "SecretAccessKey": "SECRET_ACCESS_KEY", "SessionToken": "SESSION_TOKEN"}
    with monkeypatch.context() as environment:
        for key, name in names.items():
            environment.setenv(f"AWS_{name}", credentials[key])
        forget_clients()
        boto3.setup_default_session()
        yield
    boto3.setup_default_session()


def test_the_head_starts_workers_from_resolved_image_ids(aws, monkeypatch):
    code, output = ray("up")
    assert code == 0, output
    config = AutoscalingConfig(Updater.configs[0], skip_content_hash=True).get_raw_config_mutable()  # as the head does
    (head,) = instances()
    assert head["ImageId"].startswith("resolve:ssm:")  # a changed id would replace the head

    @set_initial_no_auth_action_count(0)
    def launch():
        name = WORKERS["cpu_worker"]["ImageId"].removeprefix("resolve:ssm:")
        with pytest.raises(ClientError, match="not authorized to perform: ssm:GetParameters"):
            boto3.client("ssm").get_parameters(Names=[name])
        provider = providers._get_node_provider(config["provider"], config["cluster_name"])
        for name in WORKERS:
            tags = {"ray-node-type": "worker", "ray-user-node-type": name}
            provider.create_node(config["available_node_types"][name]["node_config"], tags, 1)

    with role_of_head(monkeypatch):
        launch()
    assert {i["InstanceType"]: i["ImageId"] for i in instances() if i["InstanceId"] != head["InstanceId"]} == {
        "c7i.4xlarge": IMAGES["canonical"],
        "g6.xlarge": IMAGES["deeplearning"],
        "g6.48xlarge": IMAGES["deeplearning"],
    }


def test_a_second_ray_up_keeps_the_head_and_looks_the_images_up_again(aws):
    up()
    (head,) = instances()
    for versions in aws.parameters.values():
        versions[-1].value += "new"
    up()
    assert [i["InstanceId"] for i in instances()] == [head["InstanceId"]]
    types = Updater.configs[1]["available_node_types"]
    assert types["cpu_worker"]["node_config"]["ImageId"] == IMAGES["canonical"] + "new"


def no_token(aws, monkeypatch):
    aws.token.unlink()


def no_image(aws, monkeypatch):
    aws.parameters.clear()


def no_credentials(aws, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def no_file(aws, monkeypatch):
    monkeypatch.setattr(commands.yaml, "safe_load", lambda _: {**CONFIG, "file_mounts": {"~/data": "no/such/data"}})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            no_token,
            "can't copy ~/.ray/auth_token to it: no such file\n  → create the token: (umask 077 && ray get",
        ),
        (no_file, "can't copy no/such/data to it: no such file\n  → create it, or remove it from file_mounts"),
        (no_image, f"images: {REGION} has no /aws/service/"),
        (no_credentials, "there are no AWS credentials\n  → run `aws configure`"),
    ],
)
def test_missing_requirements_are_named_before_a_machine_starts(aws, monkeypatch, spoil, message):
    spoil(aws, monkeypatch)
    code, output = ray("up")
    assert code == 1 and message in output and "Traceback" not in output, output
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    assert instances() == []


def test_ray_down_needs_neither_token_nor_images(aws, monkeypatch):
    up()
    no_token(aws, monkeypatch)
    no_image(aws, monkeypatch)
    code, output = ray("down")
    assert code == 0 and instances() == [], output


def test_the_file_lists_the_rights_that_ray_uses(aws, monkeypatch):
    assert ray("up")[0] == ray("down")[0] == 0
    named = set(re.findall(r"\b(?:ec2|iam|ssm):\w+", CLUSTER.read_text())) - {"ssm:GetParameters"}
    used = {call for call in aws.calls if call.split(":")[0] in ("ec2", "iam")}
    implied = {
        "ec2:CreateTags",
        "ec2:DescribeInstanceTypes",
        "iam:PassRole",
    }  # by RunInstances; by what is left out here
    assert named - implied <= used <= named
