"""Ray's node provider for AWS, with checks for `ray up cluster.yaml` that run before anything costs money.

Ray starts the head first and only then reads the files to copy there. If the token were missing, an instance would be
left running. The head starts the workers under a separate role, which can't read the parameters that
``ImageId: resolve:ssm:…`` names (Ray attaches AmazonEC2FullAccess and AmazonS3FullAccess, no ``ssm:`` right). So the
user's credentials resolve them here, and the head gets plain image ids. The head's own image id is not resolved: the
user launches the head, and a changed id would make a second `ray up` replace the running head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from click import ClickException
from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND

try:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
except ImportError as error:
    raise ClickException(f"{error}\n  → pip install 'raypar[aws]'") from error

PARAMETER = "resolve:ssm:"  # EC2's prefix of an image id that is the value of a parameter
TOKEN = "~/.ray/auth_token"
MAKE_TOKEN = "create the token: (umask 077 && ray get-auth-token --generate >/dev/null)"
# Keys of the provider's section, the only part of the config that Ray gives a provider when it creates the head.
FILES, IMAGES = "raypar_files", "raypar_images"


class AwsProvider(AWSNodeProvider):  # type: ignore[misc]
    """Node provider that refuses to start a head if its files are missing or its workers' images can't be resolved."""

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Complete the config: role, key, subnets, security group. `ray exec` and `ray down` call this too.

        Raises:
            ClickException: there are no credentials.
        """
        provider = cluster_config["provider"]
        if boto3.Session(**provider.get("aws_credentials", {})).get_credentials() is None:
            hint = "run `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise ClickException(f"there are no AWS credentials\n  → {hint}")
        config: dict[str, Any] = AWSNodeProvider.bootstrap_config(cluster_config)
        images = {node_config.get("ImageId", "") for node_config in _worker_configs(config)}
        config["provider"][FILES] = sorted(config["file_mounts"].values())
        config["provider"][IMAGES] = sorted(image for image in images if image.startswith(PARAMETER))
        return config

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> Any:
        """Start nodes.

        Raises:
            ClickException: a file that the head needs is missing, or an image of its workers can't be resolved.
        """
        if tags.get(TAG_RAY_NODE_KIND) == NODE_KIND_HEAD:
            check_files(self.provider_config[FILES])
            self._image_ids()
        return super().create_node(node_config, tags, count)

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Return the head's config, with plain image ids for its workers."""
        image_ids = self._image_ids()
        for node_config in _worker_configs(cluster_config):
            image = node_config.get("ImageId", "")
            node_config["ImageId"] = image_ids.get(image, image)
        config: dict[str, Any] = super().prepare_for_head_node(cluster_config)
        return config

    def _image_ids(self) -> dict[str, str]:
        provider = self.provider_config
        return resolve_images(provider[IMAGES], provider["region"], provider.get("aws_credentials", {}))


def check_files(paths: Iterable[str]) -> None:
    """Raise ClickException if a local file that nodes need is missing."""
    missing = [path for path in paths if not Path(path).expanduser().exists()]
    if missing:
        hint = MAKE_TOKEN if TOKEN in missing else "create it, or remove it from file_mounts"
        raise ClickException(f"no machine was started: can't copy {', '.join(missing)} to it: no such file\n  → {hint}")


def resolve_images(images: Iterable[str], region: str, credentials: Mapping[str, str]) -> dict[str, str]:
    """Return the id of each image that is given as ``resolve:ssm:NAME``, the value of a public parameter.

    Args:
        credentials: arguments for boto3's client; empty: the credentials of the environment.

    Raises:
        ClickException: a parameter can't be read.
    """
    names = [image.removeprefix(PARAMETER) for image in images]
    if not names:
        return {}
    failure = "no machine was started: can't look up the workers' images"
    try:
        response = boto3.client("ssm", region, **credentials).get_parameters(Names=names)
    except (BotoCoreError, ClientError) as error:
        hint = "your credentials need ssm:GetParameters; or write ids (ami-…) into the file"
        raise ClickException(f"{failure}: {error}\n  → {hint}") from error
    if unknown := response["InvalidParameters"]:
        hint = "write an id (ami-…) into the file"
        raise ClickException(f"{failure}: {region} has no {', '.join(unknown)}\n  → {hint}")
    return {PARAMETER + each["Name"]: each["Value"] for each in response["Parameters"]}


def _worker_configs(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    types = config["available_node_types"].items()
    return [node_type["node_config"] for name, node_type in types if name != config["head_node_type"]]
