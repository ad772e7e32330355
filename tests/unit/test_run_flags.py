"""A new run flag is one field, which the command line, the store and a submission use."""

import json
import re
from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from raypar.cli import cluster
from raypar.cli import flags as options_of_flags
from raypar.errors import RayparError, StudyError
from raypar.execution import flags as module
from raypar.execution import options
from raypar.execution.flags import FlagCheck, RunFlags, all_flags, where
from raypar.execution.options import ResumeFlags, flags_of_run
from raypar.study.loader import load_study


@dataclass(frozen=True, kw_only=True)
class WithPriority(RunFlags):
    priority: int | None = where(
        None, "Run trials at it.", "N", check=FlagCheck(lambda n: n < 20, "is too high", "use 19"), is_submitted=False
    )
    retries: int | None = where(None, "Start a trial again this often.", "N", of_study="max_retries")


@pytest.fixture
def with_priority(monkeypatch):
    """One more flag, which is a field, and nothing else."""
    for each in (module, options_of_flags, options):
        monkeypatch.setattr(each, "RunFlags", WithPriority)
    all_flags.cache_clear()
    yield
    all_flags.cache_clear()


@pytest.mark.usefixtures("with_priority")
def test_a_new_flag_is_one_field():
    taken, app = [], typer.Typer()

    @app.command()
    @options_of_flags.takes()
    def study(flags: RunFlags):
        taken.append(flags)

    run = CliRunner().invoke
    panels = run(app, ["--help"], env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}).output.split("╭─ ")
    assert re.search(r"--priority +N +Run trials at it\.", next(each for each in panels if each.startswith("Where")))
    assert run(app, ["--priority", "5", "--seed", "0", "--repeats", "1"]).exit_code == 0
    assert taken == [WithPriority(priority=5, seed=0, repeats=1)]
    assert str(run(app, ["--priority", "20"]).exception) == "--priority 20: is too high\n  → use 19"
    stored = json.loads(ResumeFlags(file="s.py", flags=taken[0]).to_json())
    assert stored["priority"] == 5 and ResumeFlags.from_stored("s", stored).flags == taken[0]
    del stored["priority"]
    assert ResumeFlags.from_stored("s", stored).flags.priority is None, "in an older store"
    with pytest.raises(RayparError, match="--address http://head:8265 and --priority exclude each other"):
        cluster.dashboard_in(WithPriority(priority=5, address="http://head:8265"))


@pytest.mark.usefixtures("with_priority", "modules_as_they_were")
def test_a_new_flag_that_changes_a_field_of_a_study_is_one_field_too(tmp_path):
    file = tmp_path / "retried.py"
    file.write_text("from raypar import Study\nfrom raypar.workloads import digits\nstudy = Study(workload=digits)\n")
    flags = WithPriority(retries=0)
    study = load_study(file, (), flags.of_study).study
    assert study.max_retries == 0 and flags_of_run(flags, study).retries == 0
    with pytest.raises(StudyError, match="--retries = -1: must be a whole number of at least 0"):
        load_study(file, (), WithPriority(retries=-1).of_study)
    with pytest.raises(StudyError, match="use --retries 3"):
        load_study(file, ("max_retries=3",), flags.of_study)
