"""Kind of the machines of a study's parts, and the leases that they must not hold at the same time."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from raypar.errors import RayparError
from raypar.files import make_private_folder, open_private
from raypar.provenance import hardware
from raypar.run.cluster import Cluster, on_every_node
from raypar.study.part import StudyPart

HARDWARE_TIMEOUT_S = 60.0


def machines_of(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Return the kind of each of a part's machines."""
    return {"this machine": hardware()} if cluster.is_own else on_every_node(hardware, timeout_s=HARDWARE_TIMEOUT_S)


def check_machines(
    part: StudyPart, by_node: Mapping[str, Mapping[str, str]], lease: Path, *, has_results: bool
) -> None:
    """Refuse a part on machines of another kind than those of the other parts.

    The kind is kept beside the study's lease.

    Args:
        by_node: kind of each machine, see `machines_of`.
        lease: file of the study's lease.
        has_results: the store has results of the study, which the kind belongs to.

    Raises:
        RayparError: the part's machines differ, among themselves or from those of the other parts.
    """
    kinds = {json.dumps(each, sort_keys=True) for each in by_node.values()}
    hint = "run all parts on nodes of one kind (a partition or constraint of the scheduler)"
    if len(kinds) > 1:
        text = "; ".join(f"{node}: {_words(each)}" for node, each in by_node.items())
        raise RayparError(f"--part {part}: its machines differ: {text}", hint=hint)
    path, (kind,) = lease.with_name(f"{lease.name}-machines"), kinds
    with contextlib.suppress(OSError):  # without a folder there are no other parts, as with leases
        make_private_folder(path.parent)
        if not has_results and set(_parts_at(lease)) <= {part.lease_of(lease)}:
            path.unlink(missing_ok=True)  # of an earlier study
        draft = path.with_name(f"{path.name}-of-{part.number}")
        with os.fdopen(open_private(draft, os.O_TRUNC), "w") as file:
            file.write(kind)
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)  # in one step: no other part reads half of it
        draft.unlink()
        if (first := path.read_text()) != kind:
            before, here = (_words(json.loads(text)) for text in (first, kind))
            hint += f"; if results of the other kind are not wanted any more, delete {path}"
            raise RayparError(f"--part {part}: the other parts ran on {before}, this one is on {here}", hint=hint)


def _parts_at(whole: Path) -> Collection[Path]:
    return [path for path in whole.parent.glob(f"{whole.name}-part*of*") if path.suffix == ""]


def rivals(part: StudyPart | None, whole: Path) -> Collection[Path]:
    """Return the leases that must be free for a part to run, or for the whole study (`part` is None)."""
    parts = _parts_at(whole)
    if part is None:
        return parts
    return [whole, *(path for path in parts if not path.name.endswith(f"of{part.count}"))]


def _words(kind: Mapping[str, str]) -> str:
    return ", ".join(filter(None, (kind["cpu"], f"{kind['cores']} cores", kind["gpu"])))
