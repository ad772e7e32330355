"""Options of an execution, and their record in the store for ``raypar store resume``.

Others may write to a store. A study file is code, and a cluster receives the code and answers with objects that are
unpickled. So `ResumeFlags.trusted` only accepts a stored file in this folder and a stored address of this machine.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import RayparError
from raypar.execution.flags import RunFlags, all_flags
from raypar.masking import masked
from raypar.study.part import StudyPart
from raypar.train.job import Profiling, Revision

if TYPE_CHECKING:
    from raypar.execution.source import TrialSource
    from raypar.study.loader import LoadedStudy
    from raypar.study.study import Study


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an execution: the run flags and those of its command.

    Attributes:
        tracking_uri: URI of the store, also if no flag names it.
        command: the command line.
        not_before: Unix time; ignore results of trials started before, for example to continue after ``--fresh``.
        instead_of_training: trials only profile steps, or only warm up.
        revisions: versions of the code to compare; empty: there is only one.
        allowed_share: see `raypar.analysis.question.Question`.
        source: source of trials; None: that of the study.
        has_moved: the stored study of this name is this one, even if its code came from elsewhere.

    Raises:
        RayparError: the flags exclude each other, or the address is not that of a running Ray.
    """

    project_dir: Path
    tracking_uri: str
    flags: RunFlags = field(default_factory=RunFlags)
    command: Sequence[str] = ()
    not_before: float = 0.0
    instead_of_training: bool = False
    revisions: tuple[Revision, ...] = ()
    allowed_share: float | None = None
    source: TrialSource | None = None
    has_moved: bool = False

    def __post_init__(self) -> None:
        if (address := self.flags.address) is None:
            return
        if self.flags.no_ray:
            raise RayparError(f"--address {address} and --no-ray exclude each other", hint="leave one out")
        from raypar.run.cluster import check_address  # takes a while to import

        check_address(address)

    @property
    def with_ray(self) -> bool:
        """False: ranks are forked on this machine."""
        return not self.flags.no_ray

    @property
    def part(self) -> StudyPart | None:
        """Part of the study to run; None: all of it."""
        return None if self.flags.part is None else StudyPart.parse(self.flags.part)

    @property
    def profiling(self) -> Profiling:
        """Profiling of every trial of the first repeat."""
        return Profiling(self.flags.num_profiled_steps, self.instead_of_training)

    def codes(self, loaded: LoadedStudy) -> dict[str, Mapping[str, str]]:
        """Return the digests of the study's current source files by revision; a single one has the key ``""``."""
        return {revision.label: revision.code for revision in self.revisions} or {"": loaded.code}

    @property
    def is_resumable(self) -> bool:
        """True if `raypar store resume` continues the study; False: only its command does."""
        return not (self.revisions or self.source or self.instead_of_training)


@dataclass(frozen=True, kw_only=True)
class ResumeFlags:
    """Flags of a study's latest execution, for ``raypar store resume``.

    The JSON under the tag `TAG` has these fields as keys, with those of `RunFlags` in place of `flags`.

    Attributes:
        command: command that continues the study; empty: `raypar store resume` does.
    """

    file: str
    flags: RunFlags
    not_before: float = 0.0
    command: str = ""

    TAG = "raypar.resume"

    @classmethod
    def of(cls, loaded: LoadedStudy, options: Options, started_at: float) -> ResumeFlags:
        """Return the flags, without passwords, of an execution that started at a Unix time."""
        data_dir, address = os.environ.get("RAYPAR_DATA_DIR"), options.flags.address
        flags = flags_of_run(options.flags, loaded.study)
        return cls(
            file=str(loaded.path),
            flags=replace(flags, data_dir=Path(data_dir) if data_dir else None, address=address and masked(address)),
            not_before=started_at if options.flags.fresh else options.not_before,
            command=masked(shlex.join(options.command)) if options.revisions or options.source else "",
        )

    def to_json(self) -> str:
        flags = {each.name: getattr(self.flags, each.name) for each in all_flags() if each.is_resumed}
        flags = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
        values = {"file": self.file, **flags, "not_before": self.not_before, "command": self.command}
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_stored(cls, study: str, stored: Mapping[str, object]) -> ResumeFlags:
        """Return a study's flags from the store. Raises RayparError if one is missing or of another type."""
        others: dict[str, Any] = {"file": None, "not_before": 0.0, "command": "", **stored}
        kinds: dict[str, type | tuple[type, ...]] = {"file": str, "not_before": (int, float), "command": str}
        wrong = [name for name, kind in kinds.items() if not isinstance(others[name], kind)]
        values: dict[str, Any] = {}
        for flag in all_flags():
            if flag.is_resumed:
                try:
                    values[flag.name] = flag.read(stored)
                except TypeError:
                    wrong.append(flag.name)
        if wrong:
            problem = f"the store has no record of how study `{study}` was run: {', '.join(wrong)}"
            hint = "run it like the first time, `raypar study FILE …`; finished trials are kept"
            raise RayparError(problem, hint=hint)
        return cls(flags=RunFlags(**values), **{name: others[name] for name in kinds})

    def trusted(self, study: str, folder: Path, *, file: Path | None = None, address: str | None = None) -> ResumeFlags:
        """Return the flags, with the user's file and address instead of the stored ones.

        Raises:
            RayparError: without the user's, the stored file is not in `folder`, or the stored address is of another
                machine or perhaps of another user.
        """
        if file is None and not is_in_folder(self.file, folder):
            problem = f"the stored file of study `{study}` is {self.file}, which is not in this folder"
            command = shlex.join(["raypar", "store", "resume", study, "--file", self.file])
            raise RayparError(problem, hint=f"a study file is code; if this one is yours: `{command}`")
        stored = self.flags.address
        if address is None and stored is not None and has_to_be_named(stored):
            problem = f"study `{study}` ran on the cluster at {stored}, according to the store"
            if is_of_this_machine(stored):
                problem += "; another user may listen there now"
            command = shlex.join(["raypar", "store", "resume", study, "--address", stored])
            hint = f"a cluster gets your code and your token; if this one is yours: `{command}`"
            raise RayparError(problem, hint=hint)
        flags = self.flags
        if address not in (None, stored):
            bound = {each.name: each.default for each in all_flags() if each.without_address or each.with_address}
            flags = replace(flags, **bound, address=address)
        return replace(self, file=self.file if file is None else str(file), flags=flags)


def flags_of_run(flags: RunFlags, study: Study) -> RunFlags:
    """Return the flags. Those that change the study get its values, as far as they apply to it."""
    changing = [each for each in all_flags() if each.of_study and (study.until or not each.needs_until)]
    return replace(flags, **{each.name: getattr(study, each.of_study) for each in changing})


def is_in_folder(file: str, folder: Path) -> bool:
    """Return whether a file, after following links, is in a folder or below."""
    return "\0" not in file and Path(file).resolve().is_relative_to(folder.resolve())


def has_to_be_named(address: str) -> bool:
    """Return whether a stored address may be of another machine or user. Raises ClusterError if no Ray runs there."""
    from raypar.run.cluster import check_address, is_of_others

    check_address(address)
    return not is_of_this_machine(address) or is_of_others(address)


def is_of_this_machine(address: str) -> bool:
    """Return whether a cluster's address is of this machine, from whose files Ray resolves ``auto``."""
    from raypar.track.server import is_loopback

    return address == "auto" or is_loopback(address.rpartition(":")[0].strip("[]"))
