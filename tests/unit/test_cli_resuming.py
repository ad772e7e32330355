"""Command that continues an interrupted study, and its stored flags."""

import json
import shlex
from pathlib import Path
from typing import get_args, get_origin

import pytest
import stage

from raypar import Study
from raypar.analysis.question import question_of
from raypar.cli.study import resume_command
from raypar.errors import RayparError
from raypar.execution.flags import RunFlags, all_flags
from raypar.execution.options import ResumeFlags
from raypar.execution.results import execution_record
from raypar.study.loader import LoadedStudy
from raypar.track.store import default_tracking_uri
from raypar.workloads import digits


def loaded(path, name="s"):
    return LoadedStudy(Study(workload=digits, name=name), path, "", "", (), ())


def options_of(folder, **given):
    return stage.options_of(folder, **{"tracking_uri": default_tracking_uri(folder), **given})


@pytest.mark.parametrize(
    ("file", "flags", "words"),
    [
        ("project/studies/s.py", {}, []),
        ("s.py", {}, ["--file", "FOLDER/s.py"]),
        ("project/s.py", {"address": "auto"}, []),
        ("project/s.py", {"address": "head:6379"}, ["--address", "head:6379"]),
        ("project/s.py", {"tracking_uri": "http://me:pw@head:5"}, ["--tracking-uri", "http://me:***@head:5"]),
    ],
)
@pytest.mark.usefixtures("no_ray_of_others")
def test_the_resume_command_is_short_and_has_no_password(tmp_path, file, flags, words):
    command = resume_command(loaded(tmp_path / file, "a study"), options_of(tmp_path / "project", **flags))
    expected = ["raypar", "store", "resume", "a study", *(word.replace("FOLDER", str(tmp_path)) for word in words)]
    assert shlex.split(command) == expected


def resumed(folder, given, **first):
    """Return the flags with which `resume` continues a study, perhaps at another address."""
    study_file = loaded(folder / "s.py")
    record = execution_record(study_file, options_of(folder, **first), question_of(study_file.study))
    return ResumeFlags.from_stored("s", json.loads(record.tags["raypar.resume"])).trusted("s", folder, address=given)


@pytest.mark.parametrize(
    ("given", "first", "is_exclusive"),
    [
        (None, {"address": "auto", "exclusive": True}, True),
        ("head:6379", {"address": "head:6379", "exclusive": True}, True),
        ("another:6379", {"address": "head:6379", "exclusive": True}, False),
        (None, {"address": "auto"}, False),
    ],
)
@pytest.mark.usefixtures("no_ray_of_others")
def test_an_exclusive_cluster_stays_exclusive(tmp_path, given, first, is_exclusive):
    assert resumed(tmp_path, given, **first).flags.exclusive == is_exclusive


def other_than(flag):
    """Return a value of a run flag that is not its default."""
    kinds = get_args(flag.type) or (flag.type,)
    by_kind = {bool: True, int: 7, float: 7.5, str: "auto" if flag.name == "address" else "fresh", Path: Path("/data")}
    return ("epochs=1",) if get_origin(flag.type) is tuple else by_kind[kinds[0]]


@pytest.mark.parametrize("flag", [each for each in all_flags() if each.is_resumed], ids=lambda flag: flag.name)
def test_every_resumed_flag_is_read_back(flag):
    given = {"repeats": 1, "seed": 0, flag.name: other_than(flag)}
    given |= {"address": "auto"} if flag.without_address else {}
    record = ResumeFlags(file="s.py", flags=RunFlags(**given))
    assert ResumeFlags.from_stored("s", json.loads(record.to_json())) == record


def test_stored_keys_stay_readable():
    first = {"file": "s.py", "set": ["epochs=1"], "repeats": 3, "seed": 0, "data_dir": None, "address": None}
    first |= {"isolation": "warm", "no_ray": False, "trial_timeout": None}
    later = {"num_profiled_steps": 0, "log_model": False, "system_metrics": False, "exclusive": False}
    later |= {"not_before": 0.0, "share_machine": False, "min_nodes": None, "log_all_models": False}
    later |= {"until": None, "margin": None, "max_repeats": None, "budget": None, "command": ""}
    stored = first | later
    assert json.loads(ResumeFlags.from_stored("s", {**stored, "until": ""}).to_json()) == stored
    assert json.loads(ResumeFlags.from_stored("s", {**first, "of a later version": 1}).to_json()) == stored
    with pytest.raises(RayparError, match="has no record of how study `s` was run: seed, exclusive"):
        ResumeFlags.from_stored("s", {**stored, "seed": None, "exclusive": "yes"})
