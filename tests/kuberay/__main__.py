"""``python -m tests.kuberay FILE``: write the schema from KubeRay's custom resource definition of `RayJob`."""

import gzip
import json
import sys
from pathlib import Path

import yaml

from . import SCHEMA

versions = yaml.safe_load(Path(sys.argv[1]).read_text())["spec"]["versions"]
(schema,) = (each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1")
SCHEMA.write_bytes(gzip.compress(json.dumps(schema, separators=(",", ":")).encode(), 9, mtime=0))
