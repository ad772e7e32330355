"""Whether the packages are there, in versions that raypar was made for, and can be imported."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from raypar.doctor.finding import Finding, well_or
from raypar.provenance import versions

OLDEST_PYTHON = (3, 11)
DISTRIBUTION = "raypar"
TORCH = """
import json, torch, torchvision
print(json.dumps([torch.__version__, torchvision.__version__, torch.cuda.device_count(), torch.version.cuda]))
"""


def python() -> Finding:
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return well_or(
        "versions",
        told,
        is_well=sys.version_info >= OLDEST_PYTHON,
        mend=f"make an environment of Python {oldest} or later",
    )


def versions_in_range() -> Iterator[Finding]:
    """The packages that are absent or of another version than raypar asks for; one finding where there is none."""
    amiss = list(out_of_range(metadata.requires(DISTRIBUTION) or ()))
    if not amiss:
        yield Finding("packages", "all there, in the versions asked for")
        return
    for requirement, installed in amiss:
        yield Finding(
            "packages",
            f"{requirement.name} {installed or 'is not installed'}; asked for is {requirement.specifier or 'any'}",
            is_well=False,
            mend=f"pip install '{requirement.name}{_extras(requirement)}{requirement.specifier}'",
        )


def out_of_range(requirements: Iterable[str]) -> Iterator[tuple[Requirement, str | None]]:
    """Which of the requirements this environment does not meet, and what it has instead. Those of extras count only
    where the package is there."""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        is_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if not is_extra:
                yield requirement, None
            continue
        if not requirement.specifier.contains(Version(installed), prereleases=True):
            yield requirement, installed


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


@dataclass(frozen=True)
class TorchFound:
    """How importing torch went; `num_gpus` is None where it can't be imported."""

    finding: Finding
    num_gpus: int | None


def torch_imports() -> TorchFound:
    """In a process of its own: a broken torch may end the interpreter."""
    done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        torch, torchvision, num_gpus, cuda = json.loads(done.stdout.splitlines()[-1])
        built = f"for CUDA {cuda}" if cuda else "without CUDA"
        return TorchFound(Finding("torch and torchvision", f"import ({torch} {built}, {torchvision})"), num_gpus)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    mend = "install both from the same index, in one command"
    if importlib.util.find_spec("torch") is None:
        last, mend = "not here: reports and `--address http://…` work, trials don't", "pip install 'raypar[train]'"
    return TorchFound(Finding("torch and torchvision", last, False, mend), None)
