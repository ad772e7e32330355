"""Several machines (simulated: Ray nodes that are said to be machines): trials side by side, one on each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from telling import HERE

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]


def test_trials_run_side_by_side_on_machines_of_their_own_on_those_that_join_and_again_where_one_is_lost(
    tmp_path: Path,
) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, HERE / "simulated.py", tmp_path], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            code = process.wait(400)
        finally:
            for left in [*psutil.Process().children(recursive=True)]:
                if process.pid in {left.pid, *(parent.pid for parent in left.parents())}:
                    left.kill()
    assert code == 0, (tmp_path / "log").read_text()
    told = json.loads((tmp_path / "told.json").read_text())
    trials = told["trials"]
    assert told["changes"][0] == told["changes"][-1] == [3, 3]
    ended = {own: trial["failure"] for own, trial in trials.items()}
    # They end only where all three run at the same time.
    assert {own: ended[own] for own in ("one", "two", "three", "wide", "after")} == dict.fromkeys(
        ("one", "two", "three", "wide", "after")
    )
    assert sorted(node for own in ("one", "two", "three") for node in trials[own]["nodes"]) == ["m1", "m2", "m3"]
    assert [trials[own]["num_beside"] for own in ("one", "two", "three")] == [2, 2, 2]
    assert len(trials["wide"]["nodes"]) == 2
    assert {trial["num_sharing"] for own, trial in trials.items() if own != "too wide"} == {0}
    wide, after = trials["wide"], trials["after"]
    if wide["begun_s"] < after["ended_s"] and after["begun_s"] < wide["ended_s"]:
        assert not set(wide["nodes"]) & set(after["nodes"])
    assert trials["lost"]["failure"] is None and trials["lost"]["attempts"] == 2
    assert sorted(trials["lost"]["nodes"]) == ["m1", "m2", "m4"]
    assert "needs 16 CPUs in one gang, the cluster has 12" in ended["too wide"]
