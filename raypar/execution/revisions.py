"""Versions of the code side by side: each revision has a separate checkout, and its study is loaded from there.

The driver runs version A: it imports from A's checkout instead of the working tree. A separate process loads B's study
file and returns a pickled workload and the facts on which both versions have to agree. So modules with the same name
are never mixed up. Ranks are forked from one server per revision, which imports from that revision's checkout (see
`raypar.run.forkserver.replace_root`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path

from raypar.errors import RayparError, cut, message_of
from raypar.execution.flags import RunFlags
from raypar.execution.git import Environment, Repository, Version, digest
from raypar.run.forkserver import replace_root
from raypar.run.ranks import revision_environment
from raypar.scratch import scratch_folder
from raypar.signals import handle_signals
from raypar.study.loader import LoadedStudy, load_study
from raypar.study.options import known_options, resolve
from raypar.study.space import Grid, Value
from raypar.study.study import Study
from raypar.study.trial import REVISION, point_label
from raypar.study.workload import CommandWorkload, Config, Option, TrainLoopWorkload
from raypar.train.job import Revision
from raypar.units import listed, value_of

SAME_RAYPAR = "raypar's own code differs between the two, which is not compared: both run the raypar of this command"
# Fields of a study that may differ: they are compared, or are set here.
_FREE_FIELDS = ("workload", "name", "description", "baseline", "space", "config", "price_per_node_hour")
# Imported by ranks that run a loop of the user: what calls it, and what the first `ray.train.report` imports.
OF_LOOPS = ("raypar.train.train_loop", "ray.tune")
_MAX_SHOWN = 5


@dataclass(frozen=True)
class StudyRequest:
    """Study file and the flags that change its study."""

    file: Path
    flags: RunFlags

    def load(self, revision: Revision) -> LoadedStudy:
        """Load the file of a revision in this process."""
        assert revision.checkout is not None and revision.repository is not None
        file = revision.checkout / self.file.relative_to(revision.repository)
        return load_study(file, self.flags.set, self.flags.of_study)


@dataclass(frozen=True)
class Checkouts:
    """Two versions of the code, ready to run.

    Attributes:
        loaded: A's study with the hyperparameter `raypar.study.trial.REVISION`, under the path of the user's file.
        revisions: A and B.
        notices: messages for the user, shown before anything runs.
    """

    loaded: LoadedStudy
    revisions: tuple[Revision, Revision]
    notices: tuple[str, ...] = ()


@contextlib.contextmanager
def comparison(
    a: str,
    b: str,
    request: StudyRequest,
    *,
    patch: Path | None = None,
    env: Path | None = None,
    links: Sequence[Path] = (),
) -> Iterator[Checkouts]:
    """Check out and load two versions of the code for the duration of the block.

    Args:
        a, b: revisions as git names them; ``.``: the working tree as it is.
        patch: patch to apply to the files of B.
        env: virtual environment that B runs in.
        links: untracked folders of the working tree to link into both checkouts.

    Raises:
        RayparError: the versions can't be compared; nothing was started.
    """
    repository = Repository.of(request.file)
    request = replace(request, file=request.file.resolve())
    linked = [repository.link_target(link) for link in links]
    if patch is not None and not patch.is_file():
        raise RayparError(f"--patch {patch}: there is no such file", hint="git diff >change.patch makes one")
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder())
        repository.forget_abandoned()
        package, raypar_path = Path(sys.modules["raypar"].__file__ or "").resolve().parent, scratch / "raypar-alone"
        raypar_path.mkdir()
        (raypar_path / "raypar").symlink_to(package)
        environment = None if env is None else check_environment(env, raypar_path)
        version_b = replace(repository.look_up(b), patch=patch, environment=environment)
        versions = repository.look_up(a), version_b
        labels, short = _labels(*versions), "_".join(version.short for version in versions)
        revisions = []
        for letter, label, version in zip("ab", labels, versions, strict=True):
            checkout = stack.enter_context(repository.checkout(version, scratch / letter, linked))
            revisions.append(_revision(label, version, checkout, repository.folder, str(raypar_path), request.file))
        loaded, both, options_of_b = _load_both(revisions[0], revisions[1], request, scratch / "b.pickle")
        study = _study_of_both(loaded.study, f"{loaded.study.name}_ab_{short}", labels, options_of_b)
        notices = [SAME_RAYPAR] if repository.differs(package, *versions) else []
        yield Checkouts(replace(loaded, study=study, path=request.file), both, tuple(notices))


def _revision(
    label: str, version: Version, checkout: Path, repository: Path, raypar_path: str, study_file: Path
) -> Revision:
    """Return a version with its checkout. Raises RayparError if it lacks the study file."""
    file = checkout / study_file.relative_to(repository)
    if not file.is_file():
        hint = "the study file has to be in both; commit it, or compare with `.`"
        raise RayparError(f"{study_file}: is not in {label}", hint=hint)
    return Revision(
        label=label,
        sys_path=(str(file.parent),),
        folder=_folder_in(checkout, repository),
        repository=repository,
        checkout=checkout,
        raypar_path=raypar_path,
        python=version.environment.python if version.environment else "",
    )


def _load_both(
    a: Revision, b: Revision, request: StudyRequest, result: Path
) -> tuple[LoadedStudy, tuple[Revision, Revision], Mapping[str, Value]]:
    """Load the study of both revisions, A's in this process. Raises RayparError if more than code differs.

    Args:
        result: path for a temporary file.

    Returns:
        A's study, both revisions with their code, and the options of B's workload.
    """
    b, facts_of_b = _load_elsewhere(b, request, result)
    assert a.repository is not None and a.checkout is not None
    replace_root(a.repository, a.checkout)
    with contextlib.chdir(a.folder or Path.cwd()):
        loaded = request.load(a)
    if differences := list(_differences(_Facts.of(loaded), facts_of_b)):
        problem = f"the study differs between {a.label} and {b.label}: {listed(differences, _MAX_SHOWN)}"
        hint = "only code may differ: --set and the other flags of `study` set a value for both"
        raise RayparError(problem, hint=hint)
    return loaded, (_with_code(a, loaded), b), facts_of_b.options


def _with_code(revision: Revision, loaded: LoadedStudy) -> Revision:
    import cloudpickle

    pickle_by_value(loaded)
    workload = loaded.study.workload
    return replace(
        revision,
        preload=preload_of(loaded),
        workload=cloudpickle.dumps(workload),
        code=loaded.code,
        is_command=isinstance(workload, CommandWorkload),
    )


def _labels(a: Version, b: Version) -> tuple[str, str]:
    """Return both labels. Raises RayparError if the versions are the same, unless the user asked for that."""
    if a.content != b.content:
        return a.label, b.label if b.label != a.label else f"{b.label} (B)"
    if a.name == b.name and b.patch is None and not b.environment:
        return a.label, f"{b.label} (again)"
    problem = f"{a.label} and {b.label} are the same code"
    hint = f"name two that differ; `raypar ab {a.name} {a.name} -- study …` compares one with itself"
    raise RayparError(problem, hint=hint)


def _study_of_both(study: Study, name: str, labels: tuple[str, str], options: Mapping[str, Value]) -> Study:
    """Return the study with the revision as its first hyperparameter.

    Args:
        options: defaults of B's options, of which A may lack some.
    """
    if REVISION in known_options(study.workload) or REVISION in study.space:
        problem = f"workload {study.workload.name} already has an option `{REVISION}`"
        raise RayparError(problem, hint="rename it: `raypar ab` needs that name")
    a, b = labels
    revision = Option(a, str, "version of the code in `raypar ab`")
    of_b = {key: Option(value, object, "only B has it", optional=True) for key, value in options.items()}
    workload = replace(study.workload, options={**of_b, **study.workload.options, REVISION: revision}, has_test=False)
    return replace(
        study,
        workload=workload,
        name=name,
        space={REVISION: Grid(labels), **study.space},
        baseline={REVISION: a},
        max_concurrent_trials=None,
        description=f"How does {b} compare with {a}? {study.description}".strip(),
    )


def pickle_by_value(loaded: LoadedStudy) -> None:
    """Make cloudpickle pickle the functions of the study file, and of modules beside it, by value."""
    import cloudpickle

    for name in (loaded.module_name, *loaded.local_modules):
        cloudpickle.register_pickle_by_value(sys.modules[name])


def preload_of(loaded: LoadedStudy) -> tuple[str, ...]:
    """Return the modules worth importing before a study's trials."""
    workload = loaded.study.workload
    runs = OF_LOOPS if isinstance(workload, TrainLoopWorkload) else ()
    return tuple(dict.fromkeys((*workload.preload, *loaded.imported_modules, *runs)))


def _folder_in(checkout: Path, repository: Path) -> Path:
    """Return the folder of a checkout that corresponds to the current one."""
    here = Path.cwd().resolve()
    if not here.is_relative_to(repository):
        return here
    there = checkout / here.relative_to(repository)
    return there if there.is_dir() else checkout


# ---- environments

_CHECK = """
import json, sys
from importlib import metadata
packages = sorted({f"{each.name}=={each.version}" for each in metadata.distributions()})
about = {"python": sys.version_info[:2], "packages": packages, "error": ""}
try:
    import cloudpickle, raypar.execution.revisions, raypar.train.worker, raypar.train.loop, raypar.measure.telemetry
except Exception as error:
    about["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(about))
"""


def check_environment(env: Path, raypar_path: Path) -> Environment:
    """Return a virtual environment by its folder or interpreter. Raises RayparError if ranks can't run in it."""
    candidates = [path for path in (env / "bin" / "python", env) if path.is_file() and os.access(path, os.X_OK)]
    if not candidates:
        raise RayparError(f"--env {env}: has no bin/python", hint="name the folder of a virtual environment")
    python = str(candidates[0].absolute())
    done = subprocess.run(
        [python, "-P", "-c", _CHECK],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(raypar_path)},
    )
    try:
        about = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        problem = f"--env {env}: its Python ends with exit code {done.returncode}: {cut(done.stderr.strip(), 300)}"
        raise RayparError(problem, hint="check that environment") from None
    here, there = (".".join(map(str, version)) for version in (sys.version_info[:2], about["python"]))
    if there != here:
        problem = f"--env {env}: has Python {there}, and raypar runs on {here}"
        raise RayparError(problem, hint=f"use Python {here} there")
    here_ray = metadata.version("ray")
    there_ray = dict(package.split("==", 1) for package in about["packages"]).get("ray")
    if here_ray != there_ray:
        problem = f"--env {env}: has {f'Ray {there_ray}' if there_ray else 'no Ray'}, and raypar runs with {here_ray}"
        raise RayparError(problem, hint=f"install it there: pip install ray=={here_ray}")
    if about["error"]:
        hint = "install raypar's dependencies there: pip install 'raypar[train]'"
        raise RayparError(f"--env {env}: raypar can't be imported there: {about['error']}", hint=hint)
    return Environment(python, digest("\n".join([there, *about["packages"]]).encode()))


# ---- loading a study in another process


@dataclass(frozen=True)
class _Facts:
    """Parts of a study on which two versions have to agree, and the defaults of its workload's own options."""

    fields: Mapping[str, str]
    configs: Mapping[str, Config]
    options: Mapping[str, Value]

    @classmethod
    def of(cls, loaded: LoadedStudy) -> _Facts:
        study, workload = loaded.study, loaded.study.workload
        named = {f.name: repr(getattr(study, f.name)) for f in fields(study) if f.name not in _FREE_FIELDS}
        named["workload"] = repr(workload.name)
        named["space"] = ", ".join(study.space) or "nothing swept"
        named["kind of workload"] = workload.kind
        points = study.points() if not study.is_search else ()
        configs = {point_label(point): resolve(workload, {**study.config, **point}) for point in points}
        # Without kinds and checks, which may differ between versions.
        options = {
            key: option.default if isinstance(option, Option) else option for key, option in workload.options.items()
        }
        return cls(named, configs, options)


def _differences(a: _Facts, b: _Facts) -> Iterator[str]:
    """Yield the differences between the two studies that make a comparison impossible."""
    for name in a.fields:
        if a.fields[name] != b.fields.get(name):
            yield f"{name} {a.fields[name]} and {b.fields.get(name)}"
    only_a, only_b = sorted(a.configs.keys() - b.configs), sorted(b.configs.keys() - a.configs)
    if only_a or only_b:
        yield f"points {listed(only_a, 2) or 'none more'} and {listed(only_b, 2) or 'none more'}"
        return
    pairs = [(config, b.configs[point]) for point, config in a.configs.items()]
    yield from sorted(
        {
            f"{key}={value_of(config[key])} and {value_of(other[key])}"
            for config, other in pairs
            for key in config.keys() & other
            if repr(config[key]) != repr(other[key])
        }
    )


def _load_elsewhere(revision: Revision, request: StudyRequest, result: Path) -> tuple[Revision, _Facts]:
    """Load a revision's study in a separate process with its interpreter. Raises RayparError if loading fails."""
    words = [revision.python or sys.executable, "-P", "-c", "from raypar.execution.revisions import main; main()"]
    done = subprocess.run(
        words,
        input=pickle.dumps((revision, request, result)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=revision.folder,
        env={**os.environ, **revision_environment(revision)},
    )
    try:
        outcome: tuple[Revision, _Facts] | RayparError = pickle.loads(result.read_bytes())
    except (OSError, EOFError):
        last = cut(done.stdout.decode(errors="replace").strip()[-500:], 500)
        problem = f"{request.file}: loading it from {revision.label} ended with exit code {done.returncode}: {last}"
        raise RayparError(problem, hint="does `raypar plan` work at that revision?") from None
    if isinstance(outcome, RayparError):
        raise RayparError(f"{revision.label}: {outcome.message}", hint=outcome.hint)
    return outcome


def main() -> None:
    """Load a study for `_load_elsewhere`, and write the revision with its code and the facts, or a RayparError."""
    revision, request, result = pickle.load(sys.stdin.buffer)
    replace_root(revision.repository, revision.checkout)
    outcome: tuple[Revision, _Facts] | RayparError
    try:
        with handle_signals():
            loaded = request.load(revision)
            facts = _Facts.of(loaded)
            configs = {repr(sorted(config.items(), key=repr)): config for config in facts.configs.values()}
            for config in configs.values():
                loaded.study.workload.prepare(config)
        outcome = _with_code(revision, loaded), facts
    except RayparError as error:
        outcome = RayparError(error.message, hint=error.hint)
    except Exception as error:
        outcome = RayparError(f"{request.file}: {type(error).__name__}: {cut(message_of(error))}", hint="fix it there")
    result.write_bytes(pickle.dumps(outcome))
