"""Options of an execution, and the flags that ``raypar store resume`` finds in the store.

A store is data, and may be written by others. A study file is code, and a cluster gets the code and answers with
objects that are unpickled: `ResumeFlags.trusted` takes a stored file or address only where it is this folder's or
this machine's.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from raypar.errors import RayparError
from raypar.masking import masked
from raypar.run.runner import ISOLATIONS
from raypar.study.overrides import UNTIL_FLAGS
from raypar.study.trial import TrialSpec
from raypar.train.job import NO_PROFILING, Profiling, Revision

if TYPE_CHECKING:
    from raypar.execution.plan import ExecutionPlan
    from raypar.study.loader import LoadedStudy
    from raypar.study.trial import TrialResult


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of a command that runs a study.

    Attributes:
        address: of a Ray cluster that is there (``auto``, ``host:port``); None: a private one.
        with_ray: False: ranks are forked on this machine, without Ray.
        rerun_all: run trials too whose results the store has.
        retry_failed: run trials of stopped points again, though their code has not changed.
        exclusive: nobody else uses the cluster at ``address``.
        share_machine: run at once, beside studies that have the cores or GPUs.
        min_nodes: of the cluster, the head included, that are waited for.
        not_before: Unix time; results of trials that were started before it don't count, as when ``--fresh`` goes on.
        command, settings: the command line and its ``--set``, for the record and a later resumption.
        profiling: of every trial of the first repeat.
        revisions: versions of the code that are compared; empty: there is one.
        allowed_share: see `raypar.analysis.question.Question`.
        next_specs: gets the plan and all results so far, and returns the trials to run then; none: that was all.
        has_moved: the stored study of this name is this one, wherever its code came from before.

    Raises:
        RayparError: a value that makes no sense, or that excludes another.
    """

    project_dir: Path
    tracking_uri: str
    address: str | None = None
    with_ray: bool = True
    isolation: str = "warm"
    rerun_all: bool = False
    retry_failed: bool = False
    trial_timeout_s: float | None = None
    command: Sequence[str] = ()
    settings: Sequence[str] = ()
    profiling: Profiling = NO_PROFILING
    log_model: bool = False
    system_metrics: bool = False
    exclusive: bool = False
    share_machine: bool = False
    min_nodes: int | None = None
    not_before: float = 0.0
    revisions: tuple[Revision, ...] = ()
    allowed_share: float | None = None
    next_specs: Callable[[ExecutionPlan, Sequence[TrialResult]], Sequence[TrialSpec]] | None = None
    has_moved: bool = False

    def __post_init__(self) -> None:
        if self.isolation not in ISOLATIONS:
            raise RayparError(f"--isolation {self.isolation}: unknown", hint=f"one of {', '.join(ISOLATIONS)}")
        limit_s = self.trial_timeout_s
        if limit_s is not None and not 0 < limit_s < math.inf:
            raise RayparError(f"--trial-timeout {limit_s:g}: must be greater than 0", hint="give it in seconds")
        if self.min_nodes is not None and self.min_nodes < 1:
            raise RayparError(f"--min-nodes {self.min_nodes}: must be at least 1", hint="the head counts as a node")
        if self.address is None:
            return
        if not self.with_ray:
            raise RayparError(f"--address {self.address} and --no-ray exclude each other", hint="leave one out")
        from raypar.run.cluster import check_address  # takes a while to import

        check_address(self.address)

    def codes(self, loaded: LoadedStudy) -> dict[str, Mapping[str, str]]:
        """Return the digests of the source files that the study has now, by revision; of one alone under ``""``."""
        return {revision.label: revision.code for revision in self.revisions} or {"": loaded.code}

    def code_of(self, spec: TrialSpec, loaded: LoadedStudy) -> Mapping[str, str]:
        """Return the digests of the source files that a trial of the study runs."""
        return self.codes(loaded).get(spec.placement.revision, loaded.code)

    @property
    def is_resumable(self) -> bool:
        """True where `raypar store resume` continues the study; otherwise the command that runs it does."""
        return not (self.revisions or self.next_specs or self.profiling.instead_of_training)


# Options that are flags as they are.
_SAME = ("isolation", "log_model", "system_metrics", "exclusive", "share_machine", "min_nodes")


@dataclass(frozen=True, kw_only=True)
class ResumeFlags:
    """Flags of a study's latest execution, for ``raypar store resume``.

    The fields are the keys of the JSON under the tag `TAG`, and are named as the options of ``raypar study``. A field
    with a default came later: stores from before lack it. Only `command`, where it is not empty, goes on with a study
    that another verb has made.
    """

    file: str
    set: list[str]
    repeats: int
    seed: int
    data_dir: str | None
    address: str | None
    isolation: str
    no_ray: bool
    trial_timeout: int | float | None
    num_profiled_steps: int = 0
    log_model: bool = False
    system_metrics: bool = False
    exclusive: bool = False
    not_before: int | float = 0.0
    share_machine: bool = False
    min_nodes: int | None = None
    until: str = ""
    margin: int | float | None = None
    max_repeats: int | None = None
    budget: int | float | None = None
    command: str = ""

    TAG = "raypar.resume"

    @classmethod
    def of(cls, loaded: LoadedStudy, options: Options, started_at: float) -> ResumeFlags:
        """Return the flags of an execution that was started at a Unix time; without passwords."""
        same: dict[str, Any] = {name: getattr(options, name) for name in _SAME}
        if loaded.study.until:
            same |= {name: getattr(loaded.study, name) for name in UNTIL_FLAGS}
        return cls(
            file=str(loaded.path),
            set=list(options.settings),
            repeats=loaded.study.num_repeats,
            seed=loaded.study.seed,
            data_dir=os.environ.get("RAYPAR_DATA_DIR"),
            address=options.address and masked(options.address),
            no_ray=not options.with_ray,
            trial_timeout=options.trial_timeout_s,
            num_profiled_steps=options.profiling.num_steps,
            not_before=started_at if options.rerun_all else options.not_before,
            command=masked(shlex.join(options.command)) if options.revisions or options.next_specs else "",
            **same,
        )

    @property
    def until_flags(self) -> dict[str, Any]:
        """Those of a study that runs until it is settled; empty for another one."""
        return {name: getattr(self, name) for name in UNTIL_FLAGS} if self.until else {}

    def applied_to(self, options: Options) -> Options:
        """Return the options with these flags."""
        same: dict[str, Any] = {name: getattr(self, name) for name in (*_SAME, "address", "not_before")}
        return replace(
            options,
            settings=self.set,
            with_ray=not self.no_ray,
            trial_timeout_s=self.trial_timeout,
            profiling=Profiling(self.num_profiled_steps),
            **same,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_stored(cls, study: str, stored: Mapping[str, Any]) -> ResumeFlags:
        """Return the flags that the store has of a study. Raises RayparError where one is absent or of another type."""
        types = get_type_hints(cls)
        values = {field.name: stored.get(field.name, field.default) for field in fields(cls)}
        if wrong := [name for name, value in values.items() if not _is_of_type(value, types[name])]:
            problem = f"the store has no record of how study `{study}` was run: {', '.join(wrong)}"
            hint = "run it as the first time, `raypar study FILE …`: finished trials are kept"
            raise RayparError(problem, hint=hint)
        return cls(**values)

    def trusted(self, study: str, folder: Path, *, file: Path | None = None, address: str | None = None) -> ResumeFlags:
        """Return the flags with the file and the address that the user has named, if any, in place of the stored ones.

        Raises RayparError where the stored file is not in `folder`, or the stored address is another machine's or may
        be another user's, and the user has named none.
        """
        if file is None and not is_in_folder(self.file, folder):
            problem = f"the stored file of study `{study}` is {self.file}, which is not in this folder"
            command = shlex.join(["raypar", "store", "resume", study, "--file", self.file])
            raise RayparError(problem, hint=f"a study file is code; if this one is yours: `{command}`")
        if address is None and self.address is not None and has_to_be_named(self.address):
            problem = f"study `{study}` ran on the cluster at {self.address}, according to the store"
            if is_of_this_machine(self.address):
                problem += "; what listens there now is not known to be yours"
            command = shlex.join(["raypar", "store", "resume", study, "--address", self.address])
            hint = f"a cluster gets your code and your token; if this one is yours: `{command}`"
            raise RayparError(problem, hint=hint)
        is_same = address in (None, self.address)
        return replace(
            self,
            file=self.file if file is None else str(file),
            address=self.address if address is None else address,
            exclusive=self.exclusive and is_same,  # it was said of that cluster
            min_nodes=self.min_nodes if is_same else None,
        )


def is_in_folder(file: str, folder: Path) -> bool:
    """Return whether the file, with links followed, lies in the folder or below."""
    return "\0" not in file and Path(file).resolve().is_relative_to(folder.resolve())


def has_to_be_named(address: str) -> bool:
    """Return whether only the user can say that a stored address is to be trusted: another machine's or user's.

    Raises ClusterError for what is no address of a running Ray.
    """
    from raypar.run.cluster import check_address, is_of_others

    check_address(address)
    return not is_of_this_machine(address) or is_of_others(address)


def is_of_this_machine(address: str) -> bool:
    """Return whether a cluster's address is this machine's: Ray finds ``auto`` in files of this machine."""
    from raypar.track.server import is_loopback

    return address == "auto" or is_loopback(address.rpartition(":")[0].strip("[]"))


def _is_of_type(value: object, type_: Any) -> bool:
    if type_ == list[str]:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return value is not MISSING and isinstance(value, type_)
