"""``--json`` prints one document that follows docs/schema.json and agrees with the verb's text."""

import json
import math
import os
import re
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import VERBS, joined, raypar, refused
from jsonschema import Draft202012Validator

from raypar import units
from raypar.analysis.stats import Estimate, Method
from raypar.cli.common import document_alone, quiet
from raypar.doctor import CheckResult
from raypar.reporting import documents
from raypar.run.cluster import Cluster
from raypar.study.trial import TrialState
from raypar.track.store import Store

sys.path.insert(0, str(Path(__file__).parents[1]))

import golden

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "schema.json").read_text(encoding="utf-8"))
KINDS = "list", "show", "report", "recommend", "compare", "ab", "fit", "predict", "plan", "doctor", "work"
KINDS += ("fit-batch", "memory", "network", "layout", "why", "improve")
STUDIES = "quickstart", "scaling", "search"
SIZE = "--parameters", "1M", "--set", "batch_size=512"
TABLE = "workers,time\n1,100\n1,101\n2,52\n2,53\n4,29\n4,28\n"
# Commands that print text. For JSON, --json replaces the flags that it excludes.
COMMANDS = {
    "list": ("list",),
    **{f"show {study}": ("store", "show", study) for study in STUDIES},
    **{f"recommend {study}": ("recommend", study) for study in STUDIES},
    **{f"report {study}": ("report", study, "--verbose") for study in STUDIES},
    "report at a price": ("report", "quickstart", "--verbose", "--price", "2.5"),
    "recommend to a target": golden.COMMANDS["scaling/recommend_target.txt"],
    "recommend nothing": ("recommend", "scaling", "--max-time", "1ms"),
    "compare": ("store", "compare", "quickstart", golden.RERUN),
    "compare with a gate": golden.COMMANDS["quickstart/compare.txt"],
    "compare other points": ("store", "compare", "quickstart", "apart"),
    "fit quickstart": ("model", "fit", "quickstart"),
    "fit scaling": ("model", "fit", "scaling"),
    "fit a file": ("model", "fit", "times.csv"),
    "predict": golden.COMMANDS["scaling/predict.txt"],
    "predict on the study's network": (*golden.COMMANDS["scaling/predict.txt"][:5], *SIZE),
}
STUDY = """
from raypar import Study, grid
from raypar.workloads import digits

print("a study's file prints")
space = {"batch_size": grid(32, 64), "num_workers": grid(1, 2)}
study = Study(workload=digits, space=space, baseline={"num_workers": 1}, num_repeats=3, name="asked")
"""


def definitions():
    """Return the definition of each document by its kind."""
    names = [of["$ref"].rpartition("/")[2] for of in SCHEMA["oneOf"]]
    return {SCHEMA["$defs"][name]["properties"]["kind"]["const"]: name for name in names}


def errors_of(document):
    """Return the errors of a document by the schema of its kind; the schema of all documents must agree."""
    of_kind = {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{definitions()[document['kind']]}"}
    errors = [f"{e.json_path}: {e.message}" for e in Draft202012Validator(of_kind).iter_errors(document)]
    assert bool(errors) != Draft202012Validator(SCHEMA).is_valid(document)
    return errors


def parsed(text):
    """Return the document of a text, which must be strict JSON and nothing else."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(text, parse_constant=refuse)
    assert errors_of(document) == []
    assert document["schema"] == 1
    return document


def without_views(arguments):
    return [*(word for word in arguments if word != "--verbose"), "--json"]


def apart(stored):
    """Return the quick start with other batch sizes as a separate study."""
    text = json.dumps(stored).replace(f'"study": "{golden.RERUN}"', '"study": "apart"')
    stored = json.loads(re.sub(r'"batch_size": (96|768)', r'"batch_size": 1\1', text))
    question = {**json.loads(stored["execution"]["tags"]["raypar.question"]), "study_name": "apart", "points": []}
    tags = {**stored["execution"]["tags"], "raypar.question": json.dumps(question)}
    return {**stored, "execution": {**stored["execution"], "uid": "apart", "tags": tags}}


@pytest.fixture(scope="module")
def folder():
    with golden.studies() as folder:
        (folder / "times.csv").write_text(TABLE)
        golden.journal(folder, apart(golden.rerun(Store(golden._uri(folder), folder))))
        yield folder


@pytest.fixture(scope="module")
def run(folder):
    """Return code, output and errors of a command in the folder of the golden studies."""

    def command(*arguments, width=400):
        before = Path.cwd()
        with golden._same_everywhere(folder):
            done = raypar(*arguments, width=width)
        assert Path.cwd() == before
        return done

    return command


def sentences(document):
    """Yield all sentences of a document."""
    for key in ("question", "answer", "doubt", "note", "excluded", "header", "importance", "legend", "to_settle"):
        if isinstance(document.get(key), str):
            yield from re.split(r"(?<=[.?]) (?=[A-Z])", document[key])
    for key in ("recommended", "statements", "notes", "assumptions"):
        yield from document.get(key, ())
    for caveat in document.get("caveats", ()):
        yield from (caveat["detail"], caveat["advice"]) if isinstance(caveat, dict) else (caveat,)
    for group in document.get("groups", ()):
        yield from filter(None, (group["answer"], group["better"], *group["texts"]))


def estimates(value, key=""):
    """Yield every estimate of a document with its key."""
    if isinstance(value, dict) and "method" in value:
        high = math.inf if value["high"] is None and value["low"] is not None else value["high"]
        yield key, SimpleNamespace(**{**value, "high": high})
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from estimates(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from estimates(each, key)


def numbers(document):
    """Yield the estimates of a document as the verb's text shows them."""
    shown = {k: document.get(k) for k in ("points", "comparisons", "groups", "candidates", "predictions")}
    is_predicted = document["kind"] == "predict"
    if is_predicted:  # of the bounds, the table has only efficiencies
        shown = [{**e, "at_best": None} for each in document["candidates"] for e in each["expected"]]
    for key, estimate in estimates(shown):
        if estimate.method == Method.REFERENCE:
            continue
        if key in ("speedup", "ratio", "gain"):
            yield units.ratio(estimate.value) if is_predicted else units.ratio_interval(estimate)
        elif key == "time_s":
            yield units.seconds(estimate.value) if is_predicted else units.seconds_interval(estimate, bounds=False)
        elif key == "step_time_s":
            yield units.seconds(estimate.value)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_document_is_valid_stands_alone_and_agrees_with_the_text(name, run):
    arguments = COMMANDS[name]
    code, text, err = run(*arguments)
    assert err == ""
    json_code, out, json_err = run(*without_views(arguments))
    assert (json_code, json_err) == (code, "")
    document = parsed(out)
    assert document["kind"] in arguments[:2]
    said = joined(text)
    assert [sentence for sentence in sentences(document) if joined(sentence) not in said] == []
    assert [number for number in numbers(document) if number not in said] == []


@pytest.mark.parametrize("command", ["list", "store show digits", "report digits --verbose"])
def test_a_store_of_an_older_raypar_has_documents_as_well(command):
    arguments = command.split()
    with golden.unpacked_store() as folder, golden._same_everywhere(folder):
        _, text, _ = raypar(*arguments, width=400)
        code, out, err = raypar(*without_views(arguments))
    document = parsed(out)
    assert (code, err) == (0, "") and all(joined(sentence) in joined(text) for sentence in sentences(document))
    states = [trial["state"] for trial in document.get("trials", ())]
    assert [state for state in states if state not in text] == []


def allowing_less(node):
    """Return the schema without required keys, with unknown keys forbidden."""
    if isinstance(node, list):
        return list(map(allowing_less, node))
    if not isinstance(node, dict):
        return node
    less = {key: allowing_less(value) for key, value in node.items() if key != "required"}
    return {**less, "additionalProperties": False} if isinstance(node.get("required"), list) else less


def test_every_verb_has_a_document_and_the_docs_an_example():
    kinds = definitions()
    with_json = [verb for verb, command in VERBS.items() if "as_json" in {p.name for p in command.params}]
    verbs = {verb.split()[-1]: verb for verb in with_json}
    assert sorted(kinds) == sorted(verbs) == sorted(KINDS)
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    examples = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    of_kind = {example["kind"]: example for example in examples if "kind" in example}
    assert sorted(of_kind) == sorted(kinds)
    for kind, example in of_kind.items():
        assert f"raypar {verbs[kind]} " in page and example["schema"] == 1
        schema = {"$defs": allowing_less(SCHEMA["$defs"]), "$ref": f"#/$defs/{kinds[kind]}"}
        assert [f"{e.json_path}: {e.message}" for e in Draft202012Validator(schema).iter_errors(example)] == []


def test_the_schema_in_the_docs_is_up_to_date():
    """``python -m raypar.reporting.documents >docs/schema.json`` updates it. Within a version, keys are only added."""
    Draft202012Validator.check_schema(SCHEMA)
    assert documents.schema() == SCHEMA


def test_documents_that_lack_a_key_or_have_another_value_are_invalid(run):
    document = parsed(run("report", "quickstart", "--json")[1])
    point = document["points"][0]
    for change in ({"schema": 2}, {"kind": "plan"}, {"answer": 1}, {"points": [{**point, "num_trials": "3"}]}):
        assert errors_of({**document, **change})
    assert errors_of({key: value for key, value in document.items() if key != "doubt"})
    assert errors_of({**document, "points": [{**point, "outcome": "unheard of"}]})
    assert not errors_of({**document, "a_later_key": 1})


def test_values_that_json_lacks_are_null_and_all_others_are_plain():
    @dataclass(frozen=True)
    class Any(documents.Document):
        kind = "any"
        shown = "value num=values.# values"
        value: float
        values: dict

    inf = Estimate(1.5, 1.25, math.inf, 3, 0.95, Method.RANKS)
    values = {"c": (1, None, True), TrialState.FAILED: TrialState.STOPPED, "d": "\udc80\x7f×", "e": ""}
    text = documents.to_json(Any(math.nan, {**values, "b": inf}))
    bounds = {"value": 1.5, "low": 1.25, "high": None, "num_samples": 3, "level": 0.95, "method": Method.RANKS.value}
    plain = {"c": [1, None, True], "failed": "stopped", "d": "?\x7f×", "e": "", "b": bounds}
    assert json.loads(text) == {"schema": 1, "kind": "any", "value": None, "num": 5, "values": plain}
    assert text.isascii() and "\x7f" not in text


def test_a_report_has_every_trial_and_the_best_point_of_a_search_first(run):
    scaling = parsed(run("report", "scaling", "--json")[1])
    others = {"stopped": 0, "diverged": 0, "does not fit": 0}
    assert scaling["num_by_state"] == {"finished": 29, **others, "failed": 1}
    assert scaling["num_trials"] == sum(p["num_trials"] for p in scaling["points"]) == 30
    recommended = parsed(run("recommend", "scaling", "--json")[1])
    assert recommended["recommendation"] == scaling["recommendation"]
    assert recommended["command"].startswith("raypar study ") and recommended["instead"] is None
    search = parsed(run("report", "search", "--json")[1])
    assert search["recommendation"] is None and search["recommended"] == []
    values = [p["metric"]["value"] for p in search["points"] if p["metric"] and not p["outcome"]]
    assert values == sorted(values, reverse=True)


def test_trials_have_the_same_values_as_in_the_export(run, folder):
    trials = parsed(run("store", "show", "scaling", "--json")[1])["trials"]
    assert run("store", "export", "scaling", "trials.json", "--force")[0] == 0
    exported = {row["identity"]: row for row in json.loads((folder / "trials.json").read_text())["trials"]}
    assert len(trials) == len(exported)
    for trial in trials:
        row = exported[trial["identity"]]
        same = "state", "repeat", "order", "seed", "attempts", "started_at_s", "wall_s", "train_time_s", "energy_j"
        assert [trial[key] for key in same] == [row[key] for key in same]
        assert trial["point"] == {key.removeprefix("point."): row[key] for key in row if key.startswith("point.")}
        assert (trial["reason"] is None) == (trial["state"] != "failed")


def test_the_exit_code_of_a_gate_is_in_the_document_too(run):
    for share, code in (("5%", 1), ("50%", 0)):
        exit_code, out, _ = run("store", "compare", "quickstart", golden.RERUN, "--fail-if-slower", share, "--json")
        gate = parsed(out)["gate"]
        assert exit_code == gate["exit_code"] == code and gate["result"] == ("failed" if code else "passed")
    code, out, err = run("store", "compare", "quickstart", "apart", "--fail-if-slower", "5%", "--json")
    assert (code, out) == (2, "") and "nothing can be judged" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--verbose", "--json and --verbose exclude each other"),
        ("--open --html a.html", "--json and --html and --open exclude each other"),
        ("--figures f --format svg", "--json and --figures and --format exclude each other"),
    ],
)
def test_flags_of_other_views_are_refused_before_the_study_is_read(flags, message):
    refused(message, "report", "no_such_study", "--json", *flags.split())


def test_errors_are_messages_on_standard_error(run):
    for arguments in (
        ("report", "quikstart"),
        ("store", "compare", "quickstart", "quickstart"),
        ("model", "fit", "no.csv"),
    ):
        code, out, err = run(*arguments, "--json")
        assert (code, out) == (2, "") and err.startswith("error: ") and "→" in err


def test_a_store_without_studies_is_an_empty_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    code, out, err = raypar("list", "--json")
    assert (code, err, parsed(out)["studies"]) == (0, "", [])


@pytest.mark.usefixtures("modules_as_they_were")
def test_the_output_of_a_study_file_does_not_mix_with_the_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("asked.py").write_text(STUDY)
    code, text, _ = raypar("plan", "asked.py")
    json_code, out, err = raypar("plan", "asked.py", "--json")
    plan = parsed(out)
    assert (code, json_code) == (0, 0) and "a study's file prints" in err
    assert (plan["study"], plan["num_points"], plan["num_to_run"], plan["estimated_s"]) == ("asked", 4, 12, None)
    assert "4 points × 3 repeats = 12 trials" in text and len(plan["trials"]) == plan["num_trials"] == 12
    assert [trial["order"] for trial in plan["trials"]] == list(range(1, 13))
    assert {gang["num_workers"] for gang in plan["gangs"]} == {1, 2}


@pytest.mark.usefixtures("modules_as_they_were")
def test_a_plan_on_gpus_says_why_its_trials_are_on_the_cpu(tmp_path, monkeypatch):
    machine = Cluster(({"CPU": 8, "GPU": 1},), is_own=True)
    monkeypatch.setattr("raypar.execution.machine.this_machine", lambda: machine)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("asked.py").write_text(STUDY)
    (_, text, _), (_, out, err) = raypar("plan", "asked.py"), raypar("plan", "asked.py", "--json")
    line = "device=auto: cpu, because num_workers=2 needs 2 GPUs in one gang, the cluster has 1"
    assert line in text and line in err
    assert {gang["device"] for gang in parsed(out)["gangs"]} == {"cpu"}


def test_all_checks_of_the_machine_are_in_one_document(tmp_path, monkeypatch):
    checks = [CheckResult("cores", "2", fix="of no use"), CheckResult("disk", "full", False, "free some")]
    monkeypatch.setattr("raypar.doctor.examine", lambda *_: iter(checks))
    monkeypatch.chdir(tmp_path)
    code, out, err = raypar("doctor", "--json")
    document = parsed(out)
    assert (code, err, document["is_ok"]) == (1, "", False)
    assert [check["fix"] for check in document["checks"]] == [None, "free some"]
    checks.pop()
    assert raypar("doctor", "--json")[0] == 0


def test_the_work_of_a_network_has_plain_numbers():
    code, out, err = raypar("model", "work", "digits", "--peak-tflops", "1", "--json")
    work = parsed(out)
    assert (code, err, work["num_parameters"]) == (0, "", 1_126_410)
    assert work["macs_forward"] == sum(layer["forward"] for layer in work["layers"] if layer["is_of_macs"])
    assert work["iteration"] == {"num_samples": 64, "flop": 64 * work["flop"], "least_s": 64 * work["flop"] / 1e12}
    assert work["training"]["num_samples"] == work["epochs"] * 1536


def test_the_output_of_a_measurement_does_not_mix_with_the_document(tmp_path, capfd):
    with chdir(tmp_path), document_alone(is_asked=True):
        print("a library's line")
        with quiet(tmp_path / "probe.log") as console:
            console.print("a note")
            os.write(1, b"Ray's line\n")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "a library's line\na note\n")
