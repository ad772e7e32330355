"""``raypar ab``: its command line, checkouts, imports from them, and the verdict."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
import typer
import yaml
from command import refused
from jsonschema import Draft202012Validator
from results import make_result

from raypar.analysis.ab import compare_revisions
from raypar.analysis.analyse import analyse
from raypar.analysis.comparison import Gate, Outcome
from raypar.analysis.evidence import evidence_of
from raypar.analysis.question import Question
from raypar.analysis.settle import what_is_open
from raypar.cli.ab import split_words
from raypar.errors import RayparError
from raypar.execution.flags import RunFlags
from raypar.execution.git import Repository as GitRepository
from raypar.execution.revisions import StudyRequest, check_environment, comparison
from raypar.reporting.ab import AbView, ab_markdown, verdict_lines
from raypar.reporting.view import StudyView
from raypar.run.forkserver import replaced
from raypar.study.blocks import block
from raypar.study.trial import Failure, FailureKind, TrialState
from raypar.train.job import RunSettings

ROOT = Path(__file__).parents[2]
STUDY = """
import helper_of_ab
from raypar import Study, grid
from raypar.workloads import digits
study = Study(workload=digits, space={"lr": grid(0.1, 0.2)}, config={"epochs": 1}, num_repeats=3)
"""


class Repository:
    """Git repository with a study file."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")
        (folder / ".gitignore").write_text("data/\n")
        self.write("study_of_ab.py", STUDY)
        self.write("helper_of_ab.py", "VALUE = 1\n")
        self.commit("one")
        self.write("helper_of_ab.py", "VALUE = 2\n")
        self.commit("two")

    def git(self, *words):
        identity = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        done = subprocess.run(["git", *identity, *words], cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def commit(self, message):
        self.git("add", "-A")
        self.git("commit", "-qm", message)

    def short(self, revision="HEAD"):
        return self.git("rev-parse", revision)[:7]

    def worktrees(self):
        return len(self.git("worktree", "list").splitlines())

    def compared(self, a, b, file="study_of_ab.py", settings=(), **changes):
        return comparison(a, b, StudyRequest(self.folder / file, RunFlags(set=settings, until="settled")), **changes)


@pytest.fixture
def repository(tmp_path, modules_as_they_were):
    made = Repository(tmp_path / "repository")
    yield made
    assert made.worktrees() == 1


# ---- words


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("main HEAD study s.py --repeats 3", ("main", "HEAD", ["s.py", "--repeats", "3"])),
        ("main study s.py", ("main", None, ["s.py"])),
        ("study study study s.py", ("study", None, ["study", "s.py"])),
    ],
)
def test_one_or_two_revisions_precede_study(words, parts):
    assert split_words(words.split()) == parts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("main", "raypar ab main: no `study` after one or two revisions"),
        ("main HEAD other study s.py", "no `study` after one or two revisions"),
        ("main -- study s.py --address auto", "--address: `raypar ab` runs on this machine"),
        ("main -- study s.py --log-model", "--log-model: "),
        ("--inconclusive ok main -- study s.py", "--inconclusive ok: without --fail-if-slower nothing is judged"),
        ("--fail-if-slower 5 main -- study s.py", "--fail-if-slower 5: must be a percentage"),
        ("main -- study s.py --no-such", "No such option: --no-such"),
        ("--json --markdown - main -- study s.py", "--json and --markdown - exclude each other"),
        ("main -- study s.py", "s.py: is not in a git repository"),
    ],
)
def test_bad_words_are_refused_before_anything_starts(tmp_path, words, message):
    with chdir(tmp_path):
        refused(message, "ab", *words.split())


# ---- revisions


def test_each_revision_has_its_own_files_and_workload(repository):
    with repository.compared("HEAD~1", "HEAD") as made:
        labels = (f"HEAD~1@{repository.short('HEAD~1')}", f"HEAD@{repository.short()}")
        study = made.loaded.study
        assert study.space["revision"].values == labels and list(study.space) == ["revision", "lr"]
        assert study.baseline == {"revision": labels[0]} and study.until == "settled"
        assert study.name == f"study_of_ab_ab_{repository.short('HEAD~1')}_{repository.short()}"
        assert made.loaded.path == repository.folder / "study_of_ab.py"
        texts = [(revision.checkout / "helper_of_ab.py").read_text() for revision in made.revisions]
        assert texts == ["VALUE = 1\n", "VALUE = 2\n"] and repository.worktrees() == 3
        codes = [revision.code for revision in made.revisions]
        assert codes[0]["study_of_ab.py"] == codes[1]["study_of_ab.py"]
        assert codes[0]["helper_of_ab.py"] != codes[1]["helper_of_ab.py"]
        assert {spec.placement.revision for spec in study.trials()} == set(labels)
        settings = RunSettings(Path("/logs"), revisions=made.revisions)
        assert settings.job(study.trials()[0], 1, b"").workload in {r.workload for r in made.revisions}
    assert not made.revisions[0].checkout.exists()


def test_the_trials_of_a_pair_follow_each_other_in_random_order(repository):
    with repository.compared("HEAD~1", "HEAD") as made:
        study = made.loaded.study
        first = set()
        for repeat in range(8):
            specs = block(study, repeat, study.points())
            pairs = [specs[:2], specs[2:]]
            assert all(a.config["lr"] == b.config["lr"] for a, b in pairs)
            first |= {(a.config["lr"], a.point["revision"]) for a, _ in pairs}
        assert len(first) == 4


def test_the_working_tree_runs_in_place_and_is_labelled_by_its_changes(repository):
    with repository.compared("HEAD~1", ".") as made:
        assert made.revisions[1].label == f".@{repository.short()}"
        assert made.revisions[1].checkout == repository.folder
    labels = []
    for value in (3, 4, 3):
        repository.write("helper_of_ab.py", f"VALUE = {value}\n")
        with repository.compared("HEAD", ".") as made:
            labels.append(made.revisions[1].label)
    assert labels[0] == labels[2] != labels[1] and labels[0].startswith(".@changes-")
    # An untracked file is a change, unless raypar made it.
    for name in ("new_of_ab.py", "mlflow.db", ".raypar/logs"):
        repository.write(name, "")
        with repository.compared("HEAD", ".") as made:
            assert (made.revisions[1].label == labels[0]) == (name != "new_of_ab.py")
        (repository.folder / name).unlink()
    assert repository.git("status", "--porcelain", "helper_of_ab.py") == "M helper_of_ab.py"  # nothing was staged


def test_the_same_changes_to_another_commit_are_another_version(repository):
    labels = []
    for value in (1, 2):
        repository.write("other_of_ab.py", f"VALUE = {value}\n")
        repository.commit("other")
        repository.write("helper_of_ab.py", "VALUE = 3\n")
        labels.append(GitRepository(repository.folder).look_up(".").label)
        repository.git("checkout", "-q", ".")
    assert labels[0] != labels[1]


@pytest.mark.parametrize(
    ("a", "b", "differs"),
    [("HEAD", "HEAD", False), ("HEAD~1", "HEAD", True), ("HEAD", ".", True), (".", ".", False)],
)
def test_differences_of_a_folder_are_those_of_its_versions(repository, a, b, differs):
    repository.write("package/code.py", "VALUE = 1\n")
    repository.commit("package")
    repository.write("package/code.py", "VALUE = 2\n")
    git = GitRepository(repository.folder)
    assert git.differs(repository.folder / "package", git.look_up(a), git.look_up(b)) == differs


def test_a_revision_is_only_compared_with_itself_on_request(repository):
    with repository.compared("HEAD", "HEAD") as made:
        labels = [revision.label for revision in made.revisions]
    assert labels == [f"HEAD@{repository.short()}", f"HEAD@{repository.short()} (again)"]
    with (
        pytest.raises(RayparError, match=r"main@\w+ and HEAD@\w+ are the same code"),
        repository.compared("main", "HEAD"),
    ):
        pass


def test_a_patch_is_applied_to_b_alone(repository):
    repository.write("helper_of_ab.py", "VALUE = 3\n")
    patch = repository.folder.parent / "change.patch"
    patch.write_text(repository.git("diff") + "\n")
    repository.git("checkout", "-q", ".")
    with repository.compared("HEAD", "HEAD", patch=patch) as made:
        texts = [(revision.checkout / "helper_of_ab.py").read_text() for revision in made.revisions]
        assert texts == ["VALUE = 2\n", "VALUE = 3\n"]
        assert made.revisions[1].label.startswith(f"HEAD@{repository.short()}+change.patch@")
    with (
        pytest.raises(RayparError, match=r"change\.patch: does not apply to HEAD~1: error: patch failed"),
        repository.compared("HEAD~1", "HEAD~1", patch=patch),
    ):
        pass


def test_ignored_data_is_linked_into_both(repository):
    repository.write("data/x", "1")
    data = repository.folder / "data"
    with repository.compared("HEAD~1", "HEAD", links=[data]) as made:
        assert all((revision.checkout / "data" / "x").read_text() == "1" for revision in made.revisions)
    assert data.is_dir()  # the link has gone, and nothing else
    for link, message in [
        (repository.folder / "absent", "there is no such folder"),
        (repository.folder.parent, "is not in the repository"),
        (repository.folder / "helper_of_ab.py", "has a file or folder of that name"),
    ]:
        with pytest.raises(RayparError, match=message), repository.compared("HEAD~1", "HEAD", links=[link]):
            pass


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (STUDY.replace("0.2", "0.3"), "points lr=0.2 and lr=0.3"),
        (STUDY.replace('"epochs": 1', '"epochs": 2'), "epochs=1 and 2"),
        (STUDY.replace("num_repeats=3", "num_repeats=4"), "num_repeats 3 and 4"),
        (STUDY.replace("digits", "wide_mlp"), "workload 'digits' and 'wide_mlp'"),
        ("import no_such_module\n", "HEAD@.*no_such_module"),
        (None, "study_of_ab.py: is not in HEAD@"),
    ],
)
def test_only_code_may_differ(repository, changed, message):
    if changed is None:
        repository.git("rm", "-q", "study_of_ab.py")
    else:
        repository.write("study_of_ab.py", changed)
    repository.commit("three")
    with pytest.raises(RayparError, match=message), repository.compared("HEAD~1", "HEAD"):
        pass


def test_a_flag_can_resolve_a_difference(repository):
    repository.write("study_of_ab.py", STUDY.replace('"epochs": 1', '"epochs": 2'))
    repository.commit("three")
    with repository.compared("HEAD~1", "HEAD", settings=("epochs=3",)) as made:
        assert {spec.config["epochs"] for spec in made.loaded.study.trials()} == {3}


@pytest.mark.parametrize(
    ("name", "hint"), [("mian", "did you mean main?"), ("0123456", "git log"), ("--all", "git log")]
)
def test_an_unknown_revision_is_refused(repository, name, hint):
    with pytest.raises(RayparError, match="git knows no such revision") as caught, repository.compared(name, "HEAD"):
        pass
    assert hint in str(caught.value)


def test_worktrees_of_killed_processes_are_removed(repository):
    left = repository.folder.parent / "raypar-left" / "a"
    kept = repository.folder.parent / "mine"
    for folder in (left, kept):
        repository.git("worktree", "add", "-q", "--detach", str(folder))
    for folder in (left, kept):
        subprocess.run(["rm", "-r", str(folder)], check=True)
    with repository.compared("HEAD~1", "HEAD"):
        assert repository.worktrees() == 4  # of these two, the user's own is still there
    repository.git("worktree", "prune")


# ---- environments


def environment(folder, answer):
    """Return a fake virtual environment whose Python prints an answer."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"python": [3, 8]}, "has Python 3.8, and raypar runs on 3."),
        ({"packages": []}, "has no Ray, and raypar runs with"),
        ({"packages": ["ray==1.0"]}, "has Ray 1.0, and raypar runs with"),
        (
            {"error": "ModuleNotFoundError: No module named 'psutil'"},
            "raypar can't be imported there: ModuleNotFoundError",
        ),
    ],
)
def test_an_unsuitable_environment_is_refused(tmp_path, changes, message):
    import ray

    fine = {"python": list(sys.version_info[:2]), "packages": [f"ray=={ray.__version__}"], "error": ""}
    python, digest = check_environment(environment(tmp_path / "fine", fine), tmp_path)
    assert python == str(tmp_path / "fine/bin/python") and len(digest) == 7
    with pytest.raises(RayparError, match=message):
        check_environment(environment(tmp_path / "other", {**fine, **changes}), tmp_path)


def test_a_folder_without_python_is_refused(tmp_path):
    with pytest.raises(RayparError, match="has no bin/python"):
        check_environment(tmp_path, tmp_path)


# ---- imports


def test_path_entries_in_the_repository_move_to_the_checkout(tmp_path):
    repository, checkout = tmp_path / "repository", tmp_path / "checkout"
    for folder in (repository / "src", repository / "new", repository / ".venv/lib/site-packages", checkout / "src"):
        folder.mkdir(parents=True)
    assert replaced(str(repository / "src"), repository, checkout) == str(checkout / "src")
    assert replaced(str(repository), repository, checkout) == str(checkout)
    assert replaced(str(repository / "new"), repository, checkout) is None  # instead of that of the working tree
    for kept in (repository / ".venv/lib/site-packages", tmp_path, checkout / "src"):
        assert replaced(str(kept), repository, checkout) == str(kept)


def test_an_editable_install_is_imported_from_the_checkout(tmp_path):
    """By a path file, as flit and hatch make one, and by a finder with a mapping, as setuptools does."""
    repository, checkout, site = tmp_path / "repository", tmp_path / "checkout", tmp_path / "site"
    for folder in (repository, checkout):
        for package in ("src/by_path", "lib/by_finder"):
            (folder / package).mkdir(parents=True)
            (folder / package / "__init__.py").write_text(f"WHERE = {folder.name!r}")
    site.mkdir()
    (site / "by_path.pth").write_text(str(repository / "src"))
    (site / "__editable___finder.py").write_text(f"""
import sys
from importlib.util import spec_from_file_location
MAPPING = {{"by_finder": {str(repository / "lib/by_finder")!r}}}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return spec_from_file_location(name, MAPPING[name] + "/__init__.py") if name in MAPPING else None
sys.meta_path.append(Finder)
""")
    (site / "finder.pth").write_text("import __editable___finder")
    code = f"""
import site, sys
from pathlib import Path
site.addsitedir({str(site)!r})
from raypar.run.forkserver import replace_root
replace_root(Path({str(repository)!r}), Path({str(checkout)!r}))
import by_path, by_finder
print(by_path.WHERE, by_finder.WHERE)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["checkout", "checkout"]


# ---- the verdict

A, B = "main@1", "HEAD@2"
NOISE = (0.004, -0.003, 0.001, -0.002, 0.003, 0.0, -0.004, 0.002)


def question(**changes):
    points = ({"revision": A}, {"revision": B})
    settings = {"max_repeats": 60, "num_repeats": 3, "margin": 0.02, "points": points}
    return Question("s", {"revision": A}, ("revision",), **{**settings, **changes})


def results(slowdown, *, noise=NOISE, busy=(), accuracy=0.9):
    """Return trials of A and B by block; those of `busy` blocks were disturbed."""
    made = []
    for repeat, (of_a, of_b) in enumerate(zip(noise, noise[1:] + noise[:1], strict=True)):
        for label, time_s in ((A, 1 + of_a), (B, (1 + slowdown) * (1 + of_b))):
            load = {"other_load_cores": [1.0], "num_node_cores": [2]} if repeat in busy else {}
            factor = 1.0 if repeat not in busy else 1.5 if (repeat + (label == A)) % 3 else 0.8
            made.append(make_result({"revision": label}, repeat, time_s * factor, environment=load, accuracy=accuracy))
    return made


@pytest.mark.parametrize(
    ("slowdown", "change", "text"),
    [
        (0.05, Outcome.SLOWER, f"{B} is 5.0 % slower than {A} ("),
        (-0.05, Outcome.FASTER, f"{B} is 5.0 % faster than {A} ("),
        (0.0, Outcome.EQUIVALENT, f"no difference above 2 % between {A} and {B} ("),
    ],
)
def test_the_verdict_follows_from_the_interval(slowdown, change, text):
    compared = compare_revisions(evidence_of(question(), results(slowdown)))
    assert compared.points[0].time.outcome is change
    assert verdict_lines(compared)[0].startswith(text)
    assert what_is_open(question(), results(slowdown)).stopped == "settled"


def test_an_inconclusive_verdict_names_the_blocks_needed():
    noise = tuple(4 * each for each in NOISE)
    (point,) = compare_revisions(evidence_of(question(), results(0.01, noise=noise))).points
    assert point.time.outcome is Outcome.INCONCLUSIVE and point.num_more > 0
    assert not what_is_open(question(), results(0.01, noise=noise)).stopped
    line = verdict_lines(compare_revisions(evidence_of(question(), results(0.01, noise=noise))))[0]
    assert line.startswith(f"inconclusive: about {point.num_more} more block") and "no difference" not in line
    # A few noisy pairs can't predict how many thousand more blocks are needed.
    wild = compare_revisions(evidence_of(question(), results(0.01, noise=tuple(40 * each for each in NOISE[:4]))))
    assert wild.points[0].num_more > 1000
    line = verdict_lines(wild)[0]
    assert line.startswith("inconclusive, and more than 100 more blocks would be needed: make trials longer")
    assert str(wild.points[0].num_more) not in line.replace(",", "")


@pytest.mark.parametrize(
    ("slowdown", "noise", "change"),
    [
        (0.01, tuple(4 * each for each in NOISE), f" % more time than {A} (95 % CI -"),
        (-0.01, tuple(4 * each for each in NOISE), f" % less time than {A} (95 % CI -"),
        (0.01, (0.2, -0.2), f"{B} takes 1.0 % more time than {A} (too noisy for an interval, 2 pairs)."),
        (0.01, (0.0,), f"{B} takes 1.0 % more time than {A} (1 pair, no interval)."),
    ],
)
def test_an_inconclusive_verdict_shows_the_change_and_its_interval(slowdown, noise, change):
    (line,) = verdict_lines(compare_revisions(evidence_of(question(), results(slowdown, noise=noise))))
    assert line.startswith("inconclusive") and change in line


def test_disturbed_pairs_are_excluded_if_enough_others_are_left():
    busy = (0, 3)
    (point,) = compare_revisions(evidence_of(question(), results(0.05, busy=busy))).points
    assert (point.time.outcome, point.num_pairs, point.num_blocks, point.num_disturbed) == (Outcome.SLOWER, 6, 8, 2)
    lines = verdict_lines(compare_revisions(evidence_of(question(), results(0.05, busy=busy))))
    assert lines[1] == "Other load disturbed 2 of 8 pairs; the comparison uses 6 pairs of undisturbed trials."
    (point,) = compare_revisions(evidence_of(question(), results(0.05, busy=(0, 3, 5)))).points
    assert point.num_pairs == 8 and point.time.outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    ("slowdown", "allowed", "gate"),
    [(0.05, 0.1, Gate.PASSED), (0.05, 0.02, Gate.FAILED), (0.05, 0.051, Gate.INCONCLUSIVE), (0.0, 0.02, Gate.PASSED)],
)
def test_the_gate_and_the_end_compare_the_interval_with_the_limit(slowdown, allowed, gate):
    asked = question(allowed_share=allowed)
    assert compare_revisions(evidence_of(asked, results(slowdown))).gate(allowed) is gate
    assert (what_is_open(asked, results(slowdown)).stopped is None) == (gate is Gate.INCONCLUSIVE)


def test_the_margin_and_the_limit_are_shown_as_given():
    compared = compare_revisions(evidence_of(question(margin=0.125), results(0.0)))
    assert verdict_lines(compared)[0].startswith("no difference above 12.5 % between ")
    shown = [AbView(compared, "s", allowed, 0).gate_lines for allowed in (0.125, 0.07)]
    assert shown == [["--fail-if-slower 12.5 %: passed, exit code 0."], ["--fail-if-slower 7 %: passed, exit code 0."]]


def test_a_revision_with_failed_trials_does_not_pass():
    failed = [
        make_result({"revision": B}, r, state=TrialState.FAILED, failure=Failure(FailureKind.ERROR, "no"))
        for r in range(3)
    ]
    compared = compare_revisions(
        evidence_of(question(), [r for r in results(0.0) if r.spec.point["revision"] == A] + failed)
    )
    assert compared.points[0].time.outcome is Outcome.MISSING and compared.gate(0.05) is Gate.FAILED
    assert verdict_lines(compared)[0] == f"no times to compare: {B} failed."


def test_changed_code_within_a_revision_is_a_caveat():
    ran = [replace(r, code={"a.py": f"py3.11:{r.spec.point['revision']}"}) for r in results(0.0)]
    assert "other_code" not in {finding.check for finding in analyse(question(), ran).warnings}
    ran[0] = replace(ran[0], code={"a.py": "py3.11:earlier"})
    (finding,) = [finding for finding in analyse(question(), ran).warnings if finding.check == "other_code"]
    assert finding.detail.startswith("1 of 16 trials ran other code")


def test_the_metric_is_compared_too():
    (point,) = compare_revisions(evidence_of(question(), results(0.0))).points
    assert point.metric.outcome is Outcome.EQUAL
    of_a, of_b = results(0.0)[::2], results(0.0, accuracy=0.8)[1::2]
    (point,) = compare_revisions(evidence_of(question(), [*of_a, *of_b])).points
    assert point.metric.outcome is Outcome.LOWER and point.metric.estimate.value == pytest.approx(-0.1)


def test_the_document_matches_the_schema():
    schema = json.loads((ROOT / "docs" / "schema.json").read_text(encoding="utf-8"))
    from raypar.reporting.documents import to_json

    document = json.loads(to_json(AbView(compare_revisions(evidence_of(question(), results(0.05))), "s", 0.02, 1)))
    assert not list(Draft202012Validator(schema).iter_errors(document))
    assert document["gate"] == {"allowed_share": 0.02, "result": "failed", "exit_code": 1, "points": ["failed"]}


# ---- the action


def test_the_action_uses_existing_flags():
    from raypar.cli.app import app

    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    steps = {step.get("id") or step.get("name") or step["uses"]: step for step in action["runs"]["steps"]}
    script = steps["compare"]["run"]
    command = typer.main.get_command(app).commands["ab"]
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert (
        set(re.findall(r"--[a-z][a-z-]+", script))
        == {"--fail-if-slower", "--inconclusive", "--markdown", "--html"}
        <= known
    )
    used = set(re.findall(r"inputs\.([a-z-]+)", (ROOT / "action.yml").read_text(encoding="utf-8")))
    assert used == set(action["inputs"])
    assert not re.search(r"\$\{\{", script + steps["Install"]["run"] + steps["Result"]["run"])


def evaluated(text, values):
    """Return a text with its ``${{ }}`` expressions replaced, as a runner does."""
    return re.sub(r"\$\{\{\s*([\w.-]+)\s*\}\}", lambda found: values[found[1]], str(text))


def run_action(folder, path, **given):
    """Run the shell steps of the action like a runner: inputs, outputs, environment, ``bash -eo pipefail``.

    Returns:
        The outputs of the step that compares, and the exit code of the first step that fails, else 0.
    """
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    inputs = {name: given.get(name.replace("-", "_"), each.get("default")) for name, each in action["inputs"].items()}
    values = {f"inputs.{name}": str(value) for name, value in inputs.items()}
    values["github.token"] = "secret"
    outputs = {}
    for number, step in enumerate(step for step in action["runs"]["steps"] if "run" in step):
        script, output = folder / f"step{number}.sh", folder / f"output{number}"
        script.write_text(evaluated(step["run"], values))
        output.touch()
        files = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
        environment = {name: evaluated(value, values) for name, value in step.get("env", {}).items()}
        variables = {"PATH": path, "RUNNER_TEMP": str(folder), **files, **environment}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        outputs |= dict(line.split("=", 1) for line in output.read_text().splitlines())
        values |= {f"steps.{step.get('id')}.outputs.{name}": value for name, value in outputs.items()}
        if done.returncode:
            return outputs, done.returncode
    return outputs, 0


@pytest.fixture
def fake_path(tmp_path):
    """Return the search path with a raypar that writes down its words and ends with the exit code 3."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "raypar"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >words\necho verdict >raypar-ab.md\nexit 3\n')
    program.chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("inputs", "gate", "flags"),
    [
        ({"flags": "--set epochs=1"}, [], ["--set", "epochs=1"]),
        ({"fail_if_slower": "5%"}, ["--fail-if-slower", "5%", "--inconclusive", "ok"], []),
        ({"flags": "--set 'note=a b'\n  --set x=*"}, [], ["--set", "note=a b", "--set", "x=*"]),
        ({"options": '--link "my data"'}, ["--link", "my data"], []),
        ({"flags": "$(touch hacked) `touch hacked`; touch hacked"}, [], None),
        ({"study": "$(touch hacked).py", "install": "touch installed"}, [], []),
    ],
)
def test_the_action_keeps_words_exit_code_and_verdict_and_runs_no_input(tmp_path, fake_path, inputs, gate, flags):
    given = {"study": "a b.py", "install": "touch installed", **inputs}
    outputs, code = run_action(tmp_path, fake_path, **given)
    passed = (tmp_path / "words").read_text().splitlines()
    files = ["--markdown", str(tmp_path / "raypar-ab.md"), "--html", str(tmp_path / "raypar-ab.html")]
    options = gate if "link" in str(inputs) else []
    head = ["ab", *([] if options else gate), *files, *options, "HEAD^1", "HEAD", "--", "study", given["study"]]
    assert passed[: len(head)] == head and (flags is None or passed[len(head) :] == flags)
    assert outputs == {"exit-code": "3", "markdown": files[1], "html": files[3]} and code == 3
    assert (tmp_path / "summary").read_text() == "verdict\n"
    assert (tmp_path / "installed").exists() and not (tmp_path / "hacked").exists()


COMMENTS = """
const fs = require('fs'), calls = [];
const [script, comments] = [process.argv[2], JSON.parse(process.argv[3])];
const issues = {
  listComments: 'list', updateComment: async of => calls.push(['update', of.comment_id]),
  createComment: async of => calls.push(['create', of.issue_number]),
};
const github = {paginate: async () => comments, rest: {issues}};
const context = {repo: {owner: 'o', repo: 'r'}, issue: {number: 7}};
const run = Object.getPrototypeOf(async () => 0).constructor;
run('github', 'context', 'require', fs.readFileSync(script, 'utf8'))(github, context, require)
  .then(() => console.log(JSON.stringify(calls)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_the_action_updates_its_own_comment_or_makes_one(tmp_path):
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (step,) = (each for each in action["runs"]["steps"] if each.get("name") == "Comment")
    view = AbView(compare_revisions(evidence_of(question(), results(0.05))), "s", None, 0)
    text = ab_markdown(view, StudyView(analyse(question(), results(0.05))), "raypar ab")
    for name, content in {"script.js": step["with"]["script"], "run.js": COMMENTS, "a.md": text}.items():
        (tmp_path / name).write_text(content, encoding="utf-8")

    def calls(*bodies, markdown="a.md"):
        comments = json.dumps([{"id": number, "body": body} for number, body in enumerate(bodies)])
        command = ["node", tmp_path / "run.js", tmp_path / "script.js", comments]
        environment = {**os.environ, "MARKDOWN": str(tmp_path / markdown)}
        return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)

    assert calls("hello", f"{text}\n", "> quoted") == [["update", 1]]
    assert calls("hello", f"{text} is what it wrote") == [["create", 7]]
    assert calls(markdown="missing.md") == []


def test_the_markdown_has_the_verdict_in_its_first_line_and_no_html_of_names():
    named = [
        replace(r, spec=replace(r.spec, point={**r.spec.point, "x": "<b>[y](javascript:z)"})) for r in results(0.05)
    ]
    asked = question(points=tuple({**point, "x": "<b>[y](javascript:z)"} for point in question().points))
    view = AbView(compare_revisions(evidence_of(asked, named)), "s", 0.02, 1)
    text = ab_markdown(view, StudyView(analyse(asked, named)), "raypar ab main '<b>'")
    first, *_, last = text.splitlines()
    assert first.startswith(f"### ❌ {B} is 5.0 % slower than {A}") and last == "<!-- raypar ab -->"
    assert set(re.findall(r"<[a-z/!]+", text)) == {"<details", "<summary", "</summary", "</details", "<!"}
    assert "](javascript" not in text and "--fail-if-slower 2 %: failed" in text
