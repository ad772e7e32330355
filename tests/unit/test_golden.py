"""The golden files of ``tests/golden`` hold what raypar does now; ``python -m tests.golden`` writes them anew."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import golden


@pytest.fixture(scope="module")
def studies():
    with golden.studies() as folder:
        yield folder


@pytest.fixture(scope="module")
def store():
    with golden.unpacked_store() as folder:
        yield folder


def written(name):
    return (golden.HERE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", golden.COMMANDS)
def test_a_command_says_of_a_stored_study_what_it_said(name, studies):
    assert golden.output(studies, name, golden.COMMANDS[name]) == written(name)


@pytest.mark.parametrize("name", golden.STORED)
def test_a_store_of_an_older_raypar_is_read_as_it_was(name, store):
    assert golden.output(store, name, golden.STORED[name]) == written(name)


@pytest.fixture(scope="module")
def scripts():
    with golden.scripts() as folder:
        yield folder


@pytest.mark.parametrize("name", golden.DRAFTS)
def test_a_script_gets_the_study_that_it_got(name, scripts):
    assert golden.output(scripts, name, golden.DRAFTS[name]) == written(name)


def test_a_kubernetes_job_is_what_it_was():
    assert golden.kubernetes_job() == written(golden.MANIFEST)


def test_every_sentence_of_a_report_is_what_it_was():
    for name, text in golden.cases.texts():
        assert golden.same_everywhere(text) == written(name), name


def test_the_results_of_an_older_store_are_those_that_were_recorded(store):
    results = golden.stored_results(store)
    assert golden.pretty(results) + "\n" == written(golden.RESULTS)
    # Step times are looked up by the identity that was written with the run: it is the one that its spec has now.
    assert len(results) == 7
    assert all(bool(r["step_times_s"]) == (r["state"] == "finished") for r in results.values())


@pytest.mark.parametrize("path", golden.STUDY_FILES, ids=lambda path: path.stem)
def test_the_trials_of_a_shipped_study_keep_their_identities(path):
    assert golden.identities_of(path) == json.loads(written(golden.IDENTITIES))[path.stem]


def test_every_golden_file_is_looked_at():
    studies = {f"studies/{name}.json.gz" for name in ("scaling", "search")}
    inputs = {"journal.jsonl", "store.tar.gz", *studies}
    outputs = {*golden.COMMANDS, *golden.STORED, *golden.DRAFTS, *(f"cases/{name}.txt" for name in golden.cases.FILES)}
    paths = [path for path in golden.HERE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    names = {str(path.relative_to(golden.HERE)) for path in paths}
    assert names == inputs | outputs | {golden.RESULTS, golden.IDENTITIES, golden.MANIFEST}
    assert set(json.loads(written(golden.IDENTITIES))) == {p.stem for p in golden.STUDY_FILES}
