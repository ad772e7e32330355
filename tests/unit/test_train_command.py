"""A command as a trial, run by a rank: reports, conditions and failures."""

import sys

import pytest
from results import make_spec
from training import Reports

from raypar.study.command import Command
from raypar.train.command import CommandFailed, run_command
from raypar.train.job import RankContext, RunSettings, TrialJob

ALONE = RankContext(0, 1, 0, 1, 0)
SCRIPT = """
import json
for epoch in range(3):
    print(json.dumps({{"epoch": epoch, "loss": 0.5}}))
"""


def run(folder, code):
    """Return the outcome of a Python command, and its reports."""
    reports, settings = Reports(), RunSettings(folder / "logs", sys_path=(str(folder),))
    job = TrialJob(make_spec({"num_workers": 1}, num_threads=1), 1, b"", settings)
    return run_command(Command((sys.executable, "-c", code)), job, ALONE, reports, None), reports


def test_a_commands_conditions_do_not_include_the_waits_of_the_process_that_reads_its_output(tmp_path):
    outcome, reports = run(tmp_path, SCRIPT)
    assert [(report["epoch"], report["loss"]) for report in reports] == [(i, 0.5) for i in range(3)]
    assert (outcome.conditions.steps_from, outcome.conditions.laps_cover) == ("reports", "epochs 0 to 2")
    assert outcome.conditions.cpu_wait_share is None


def test_a_failed_command_has_its_exit_code_and_last_line(tmp_path):
    with pytest.raises(CommandFailed, match="ended with exit code 3: bad luck"):
        run(tmp_path, "print('bad luck'); exit(3)")
