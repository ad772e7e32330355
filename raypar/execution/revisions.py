"""Versions of the code side by side: each revision has a separate checkout, and its study is loaded from there.

The driver runs version A: it imports from A's checkout instead of the working tree. A separate process loads B's study
file and returns a pickled workload and the facts on which both versions have to agree. So modules with the same name
are never mixed up. Ranks are forked from one server per revision, which imports from that revision's checkout (see
`raypar.run.forkserver.replace_root`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from raypar.errors import RayparError, closest, cut, message_of
from raypar.execution.flags import RunFlags
from raypar.run.forkserver import replace_root
from raypar.run.ranks import revision_environment
from raypar.scratch import PREFIX, make_folder, remove_folder
from raypar.signals import handle_signals
from raypar.study.loader import LoadedStudy, load_study
from raypar.study.options import known_options, resolve
from raypar.study.space import Grid, Value
from raypar.study.study import Study
from raypar.study.trial import REVISION
from raypar.study.workload import Option
from raypar.train.job import Revision
from raypar.units import listed, value_of

WORKING_TREE = "."
HASH_CHARS = 7
# Files that raypar writes into a project's folder; they are not part of its code.
RESULT_FILES = (".raypar/", "mlflow.db*", "mlartifacts/", "mlruns/", "__pycache__/")
SAME_RAYPAR = (
    "raypar's own package differs between the two, which is not compared: both run the raypar that this command is"
)
# Fields of a study that may differ: they are compared, or are set here.
_FREE_FIELDS = ("workload", "name", "description", "baseline", "space", "config", "price_per_node_hour")
_MAX_SHOWN = 5


@dataclass(frozen=True)
class StudyRequest:
    """Study file and the flags that change its study."""

    file: Path
    flags: RunFlags

    def load(self, checkout: Path, repository: Path) -> LoadedStudy:
        """Load the file of a checkout in this process."""
        file = checkout / self.file.relative_to(repository)
        return load_study(file, self.flags.set, self.flags.of_study)


@dataclass(frozen=True)
class Version:
    """One of the two versions, before its files are checked out.

    Attributes:
        name: name as the user wrote it.
        tree: hash of its files, without the patch.
        commit: None for a working tree with uncommitted changes.
        patch: patch to apply to the files.
        python: interpreter; empty: that of the driver.
        environment: digest of the packages of that interpreter; empty: that of the driver.
    """

    name: str
    tree: str
    commit: str | None
    patch: Path | None = None
    python: str = ""
    environment: str = ""

    @property
    def is_working_tree(self) -> bool:
        return self.name == WORKING_TREE and self.patch is None

    @property
    def content(self) -> tuple[str, ...]:
        """Everything that distinguishes it from another version."""
        patch = "" if self.patch is None else _digest(self.patch.read_bytes())
        return (self.tree, patch, self.environment)

    @property
    def short(self) -> str:
        """Digest for the name of the study."""
        parts = [(self.commit or self.tree)[:HASH_CHARS], *self.content[1:]]
        return "_".join(filter(None, parts))

    @property
    def label(self) -> str:
        """``HEAD@1a2b3c4``: the name as the user wrote it, with the commit or digest that it refers to now."""
        digest = self.commit[:HASH_CHARS] if self.commit else f"changes-{self.tree[:HASH_CHARS]}"
        label = f"{self.name}@{digest}"
        if self.patch is not None:
            label += f"+{self.patch.name}@{self.content[1]}"
        return label + (f" in {_environment_name(self.python)}@{self.environment}" if self.environment else "")


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
    repository = _repository_of(request.file)
    request = replace(request, file=request.file.resolve())
    linked = [_link_target(repository, link) for link in links]
    if patch is not None and not patch.is_file():
        raise RayparError(f"--patch {patch}: there is no such file", hint="git diff >change.patch makes one")
    scratch = make_folder()
    with contextlib.ExitStack() as stack:
        stack.callback(remove_folder, scratch)
        _forget_abandoned(repository)
        raypar_path = scratch / "raypar-alone"
        raypar_path.mkdir()
        (raypar_path / "raypar").symlink_to(Path(sys.modules["raypar"].__file__ or "").resolve().parent)
        git = _Git(repository, scratch)
        version_a, version_b = git.look_up(a), git.look_up(b)
        if env is not None:
            python, digest = check_environment(env, raypar_path)
            version_b = replace(version_b, python=python, environment=digest)
        version_b = replace(version_b, patch=patch)
        labels = _labels(version_a, version_b)
        checkouts = [
            stack.enter_context(git.checkout(version, scratch / letter, linked))
            for letter, version in zip("ab", (version_a, version_b), strict=True)
        ]
        file = request.file.relative_to(repository)
        for label, checkout in zip(labels, checkouts, strict=True):
            if not (checkout / file).is_file():
                problem = f"{request.file}: is not in {label}"
                raise RayparError(problem, hint="the study file has to be in both; commit it, or compare with `.`")
        made = [
            Revision(
                label=label,
                sys_path=(str((checkout / file).parent),),
                folder=_folder_in(checkout, repository),
                repository=repository,
                checkout=checkout,
                raypar_path=str(raypar_path),
                python=version.python,
            )
            for label, version, checkout in zip(labels, (version_a, version_b), checkouts, strict=True)
        ]
        loaded_b = _load_elsewhere(made[1], request, scratch / "b.pickle")
        replace_root(repository, checkouts[0])
        with contextlib.chdir(made[0].folder or Path.cwd()):
            loaded = request.load(checkouts[0], repository)
        facts = _Facts.of(loaded)
        if differences := list(_differences(facts, loaded_b.facts)):
            problem = f"the study differs between {labels[0]} and {labels[1]}: {listed(differences, _MAX_SHOWN)}"
            hint = "only code may differ: --set and the other flags of `study` set a value for both"
            raise RayparError(problem, hint=hint)
        revisions = (
            replace(made[0], preload=preload_of(loaded), workload=pickled_workload(loaded), code=loaded.code),
            replace(made[1], preload=loaded_b.preload, workload=loaded_b.workload, code=loaded_b.code),
        )
        name = f"{loaded.study.name}_ab_{version_a.short}_{version_b.short}"
        study = _study_of_both(loaded.study, name, labels, loaded_b.facts.options)
        notices = [SAME_RAYPAR] if git.has_other_raypar(version_a, version_b) else []
        yield Checkouts(replace(loaded, study=study, path=request.file), revisions, tuple(notices))


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
        problem = f"workload {study.workload.name} has an option `{REVISION}` of its own"
        raise RayparError(problem, hint="rename it: `raypar ab` needs the name")
    a, b = labels
    revision = Option(a, str, "version of the code, as `raypar ab` has it")
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


def pickled_workload(loaded: LoadedStudy) -> bytes:
    """Return the study's workload as bytes that need no study file: ranks don't import it."""
    import cloudpickle

    pickle_by_value(loaded)
    return bytes(cloudpickle.dumps(loaded.study.workload))


def pickle_by_value(loaded: LoadedStudy) -> None:
    """Make cloudpickle pickle the functions of the study file, and of modules beside it, by value."""
    import cloudpickle

    for name in (loaded.module_name, *loaded.local_modules):
        cloudpickle.register_pickle_by_value(sys.modules[name])


def preload_of(loaded: LoadedStudy) -> tuple[str, ...]:
    """Return the modules worth importing before a study's trials."""
    return tuple(dict.fromkeys((*loaded.study.workload.preload, *loaded.imported_modules)))


# ---- git


class _Git:
    """Git in the user's repository.

    Args:
        scratch: folder for objects of the working tree's files, to keep them out of the repository.
    """

    def __init__(self, repository: Path, scratch: Path) -> None:
        self._repository, self._scratch = repository, scratch
        objects = scratch / "objects"
        objects.mkdir()
        theirs = _git(repository, "rev-parse", "--git-path", "objects").strip()
        self._environment = {
            "GIT_OBJECT_DIRECTORY": str(objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str((repository / theirs).resolve()),
            "GIT_INDEX_FILE": str(scratch / "index"),
        }

    def look_up(self, name: str) -> Version:
        """Look up a revision. Raises RayparError if it does not exist."""
        if name == WORKING_TREE:
            head = self._commit("HEAD")
            tree = self._working_tree()
            return Version(name, tree, head if head and tree == self._tree(head) else None)
        commit = self._commit(name)
        if commit is None:
            names = _git(self._repository, "for-each-ref", "--format=%(refname:short)").split()
            close = closest(name, names)
            hint = f"did you mean {' or '.join(close)}?" if close else "`git log --oneline --all` lists commits"
            if (Path.cwd() / name).exists() and not close:
                hint = "write `.` for the working tree; " + hint
            raise RayparError(f"{name}: git knows no such revision in {self._repository}", hint=hint)
        return Version(name, self._tree(commit), commit)

    @contextlib.contextmanager
    def checkout(self, version: Version, folder: Path, links: Sequence[Path]) -> Iterator[Path]:
        """Yield the top folder of a version's files: a new worktree, unless the version is the working tree."""
        if version.is_working_tree:
            yield self._repository
            return
        commit = version.commit
        if commit is None:  # uncommitted changes and a patch
            raise RayparError(
                f"--patch {version.patch}: the working tree has changes that no commit has",
                hint="commit them, or name a revision: `raypar ab HEAD --patch FILE -- study …`",
            )
        try:
            _git(self._repository, "worktree", "add", "--quiet", "--detach", str(folder), commit)
            if version.patch is not None:
                patched = _run_git(folder, "apply", "--whitespace=nowarn", str(version.patch.resolve()))
                if patched.returncode:
                    problem = (
                        f"--patch {version.patch}: does not apply to {version.name}: {cut(patched.stderr.strip(), 300)}"
                    )
                    raise RayparError(problem, hint="make it anew against that revision: git diff >change.patch")
            for link in links:
                _link(self._repository / link, folder / link, version.name)
            yield folder
        finally:
            _run_git(self._repository, "worktree", "remove", "--force", "--force", str(folder))
            shutil.rmtree(folder, ignore_errors=True)

    def has_other_raypar(self, a: Version, b: Version) -> bool:
        """Return whether the running raypar is part of the repository, and differs between the two."""
        package = Path(sys.modules["raypar"].__file__ or "").resolve().parent
        if not package.is_relative_to(self._repository):
            return False
        path = package.relative_to(self._repository)
        trees = [self._call("rev-parse", "--quiet", "--verify", f"{version.tree}:{path}") for version in (a, b)]
        in_patch = b.patch is not None and str(path) in b.patch.read_text(errors="replace")
        return trees[0] != trees[1] or in_patch

    def _commit(self, name: str) -> str | None:
        commit = _run_git(
            self._repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        )
        words = commit.stdout.split()
        return words[-1] if commit.returncode == 0 and words else None

    def _tree(self, commit: str) -> str:
        return _git(self._repository, "rev-parse", f"{commit}^{{tree}}").strip()

    def _working_tree(self) -> str:
        """Return the tree hash that committing the working tree's files, except ignored ones, would give."""
        index = self._repository / _git(self._repository, "rev-parse", "--git-path", "index").strip()
        if index.is_file():  # it records which files have not changed
            shutil.copy2(index, self._environment["GIT_INDEX_FILE"])
        excluded = [f":(exclude,glob)**/{name}{'**' if name.endswith('/') else ''}" for name in RESULT_FILES]
        self._call("add", "--all", "--", ".", *excluded)
        return self._call("write-tree").strip()

    def _call(self, *words: str) -> str:
        return _git(self._repository, *words, environment=self._environment)


def _run_git(
    folder: Path, *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    try:
        return subprocess.run(
            ["git", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env={**inherited, "LC_ALL": "C", **(environment or {})},
        )
    except FileNotFoundError:
        raise RayparError("git is not installed here", hint="install it: revisions are its") from None


def _git(folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> str:
    done = _run_git(folder, *words, environment=environment)
    if done.returncode and "--quiet" not in words[:2]:
        raise RayparError(
            f"git {' '.join(words[:2])}: {cut(done.stderr.strip(), 300)}", hint="run it by hand to see more"
        )
    return done.stdout


def _repository_of(file: Path) -> Path:
    """Return the top folder of a study file's repository. Raises RayparError if it is not in a repository."""
    folder = file.resolve().parent
    top = _run_git(folder, "rev-parse", "--show-toplevel") if folder.is_dir() else None
    if top is None or top.returncode:
        hint = "`raypar ab` compares revisions of the study file's repository; `raypar compare` compares stored studies"
        raise RayparError(f"{file}: is in no git repository", hint=hint)
    return Path(top.stdout.strip()).resolve()


def _forget_abandoned(repository: Path) -> None:
    """Remove git's entries for worktrees of killed processes, whose folders were removed with their scratch folders."""
    listing = _run_git(repository, "worktree", "list", "--porcelain").stdout
    for folder in re.findall(r"^worktree (.+)$", listing, re.MULTILINE):
        if Path(folder).parent.name.startswith(PREFIX) and not Path(folder).exists():
            _run_git(repository, "worktree", "remove", "--force", "--force", folder)


def _link_target(repository: Path, link: Path) -> Path:
    """Return a linked folder's path in the repository. Raises RayparError if it can't be linked."""
    folder = Path(os.path.normpath(link.absolute()))
    if not folder.exists():
        raise RayparError(f"--link {link}: there is no such folder", hint="name a folder of the working tree")
    parent = folder.parent.resolve()
    if not parent.is_relative_to(repository) or parent / folder.name == repository:
        hint = "name a folder below it; data from elsewhere comes with --data-dir"
        raise RayparError(f"--link {link}: is not in the repository {repository}", hint=hint)
    return (parent / folder.name).relative_to(repository)


def _link(source: Path, place: Path, name: str) -> None:
    if place.exists():
        problem = f"--link {source.name}: {name} has a file or folder of that name"
        raise RayparError(problem, hint="link what git does not have; leave this one out")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(source)


def _folder_in(checkout: Path, repository: Path) -> Path:
    """Return the folder of a checkout that corresponds to the current one."""
    here = Path.cwd().resolve()
    if not here.is_relative_to(repository):
        return here
    there = checkout / here.relative_to(repository)
    return there if there.is_dir() else checkout


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:HASH_CHARS]


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


def check_environment(env: Path, raypar_path: Path) -> tuple[str, str]:
    """Return the interpreter of a virtual environment, and a digest of its packages.

    Raises:
        RayparError: ranks can't run in it.
    """
    python = _python_of(env)
    words = [python, "-P", "-c", _CHECK]
    done = subprocess.run(
        words,
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
    version = tuple(about["python"])
    if version != sys.version_info[:2]:
        here, there = (".".join(map(str, each)) for each in (sys.version_info[:2], version))
        raise RayparError(
            f"--env {env}: has Python {there}, and raypar runs on {here}", hint=f"use Python {here} there"
        )
    packages = dict(package.split("==", 1) for package in about["packages"])
    here_ray, there_ray = _installed("ray"), packages.get("ray")
    if here_ray != there_ray:
        problem = f"--env {env}: has {f'Ray {there_ray}' if there_ray else 'no Ray'}, and raypar runs with {here_ray}"
        raise RayparError(problem, hint=f"install it there: pip install ray=={here_ray}")
    if about["error"]:
        hint = "install raypar's dependencies there: pip install 'raypar[train]'"
        raise RayparError(f"--env {env}: raypar can't be imported there: {about['error']}", hint=hint)
    return python, _digest("\n".join([python_version(version), *about["packages"]]).encode())


def python_version(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _installed(name: str) -> str | None:
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _python_of(env: Path) -> str:
    candidates = [env / "bin" / "python", env / "Scripts" / "python.exe", env]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate.absolute())
    raise RayparError(f"--env {env}: has no bin/python", hint="name the folder of a virtual environment")


def _environment_name(python: str) -> str:
    path = Path(python)
    return path.parent.parent.name if path.parent.name in ("bin", "Scripts") else path.name


# ---- loading a study in another process


@dataclass(frozen=True)
class _Facts:
    """Parts of a study on which two versions have to agree, and the defaults of its workload's own options."""

    fields: Mapping[str, str]
    configs: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Value]

    @classmethod
    def of(cls, loaded: LoadedStudy) -> _Facts:
        study, workload = loaded.study, loaded.study.workload
        named = {f.name: repr(getattr(study, f.name)) for f in fields(study) if f.name not in _FREE_FIELDS}
        named["workload"] = repr(workload.name)
        named["space"] = ", ".join(study.space) or "nothing swept"
        named["kind of workload"] = workload.kind
        points = study.points() if not study.is_search else ()
        configs = {
            " ".join(f"{k}={value_of(v)}" for k, v in point.items()): resolve(workload, {**study.config, **point})
            for point in points
        }
        # Without kinds and checks, which may differ between versions.
        options = {
            key: option.default if isinstance(option, Option) else option for key, option in workload.options.items()
        }
        return cls(named, configs, options)


@dataclass(frozen=True)
class _LoadedElsewhere:
    facts: _Facts
    preload: tuple[str, ...]
    workload: bytes
    code: Mapping[str, str]


def _differences(a: _Facts, b: _Facts) -> Iterator[str]:
    """Yield the differences between the two studies that make a comparison impossible."""
    for name in a.fields:
        if a.fields[name] != b.fields.get(name):
            yield f"{name} {a.fields[name]} and {b.fields.get(name)}"
    if a.configs.keys() != b.configs.keys():
        of_a, of_b = (sorted(one - other) for one, other in _both_ways(a.configs, b.configs))
        yield f"points {listed(of_a, 2) or 'none more'} and {listed(of_b, 2) or 'none more'}"
        return
    seen: dict[str, None] = {}
    for point, config in a.configs.items():
        other = b.configs[point]
        for key in config.keys() & other.keys():
            if repr(config[key]) != repr(other[key]):
                seen[f"{key}={value_of(config[key])} and {value_of(other[key])}"] = None
    yield from sorted(seen)


def _both_ways(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[set[str], set[str]]]:
    yield set(a), set(b)
    yield set(b), set(a)


def _load_elsewhere(revision: Revision, request: StudyRequest, result: Path) -> _LoadedElsewhere:
    """Load a revision's study in a separate process with its interpreter. Raises RayparError if loading fails."""
    words = [revision.python or sys.executable, "-P", "-c", "from raypar.execution.revisions import main; main()"]
    given = {"revision": revision, "request": request, "result": result}
    done = subprocess.run(
        words,
        input=pickle.dumps(given),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=revision.folder,
        env={**os.environ, **revision_environment(revision)},
    )
    try:
        loaded = pickle.loads(result.read_bytes())
    except (OSError, EOFError):
        last = cut(done.stdout.decode(errors="replace").strip()[-500:], 500)
        problem = f"{request.file}: loading it from {revision.label} ended with exit code {done.returncode}: {last}"
        raise RayparError(problem, hint="does `raypar plan` work at that revision?") from None
    if isinstance(loaded, RayparError):
        raise RayparError(f"{revision.label}: {loaded.message}", hint=loaded.hint)
    assert isinstance(loaded, _LoadedElsewhere)
    return loaded


def main() -> None:
    """Load a study for `_load_elsewhere`, and write the outcome: a `_LoadedElsewhere`, or a RayparError."""
    given = pickle.load(sys.stdin.buffer)
    revision, request, result = given["revision"], given["request"], given["result"]
    replace_root(revision.repository, revision.checkout)
    outcome: _LoadedElsewhere | RayparError
    try:
        with handle_signals():
            loaded = request.load(revision.checkout, revision.repository)
            facts = _Facts.of(loaded)
            configs = {repr(sorted(config.items(), key=repr)): config for config in facts.configs.values()}
            for config in configs.values():
                loaded.study.workload.prepare(config)
        outcome = _LoadedElsewhere(facts, preload_of(loaded), pickled_workload(loaded), loaded.code)
    except RayparError as error:
        outcome = RayparError(error.message, hint=error.hint)
    except Exception as error:
        outcome = RayparError(f"{request.file}: {type(error).__name__}: {cut(message_of(error))}", hint="fix it there")
    result.write_bytes(pickle.dumps(outcome))
