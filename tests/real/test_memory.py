"""Memory as a result, from the shell: trials that do not fit, and the largest batch that does."""

import json
import re

import pytest
from harness import Cli, report_in

STUDY = '''
"""Which batch of the digits fits?"""
from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"batch_size": grid(64, 512)},
    baseline={"batch_size": 64},
    num_repeats=2,
    config={"epochs": 1, "hidden_size": 512, "max_memory": "6MB"},
)
'''


def test_a_point_that_does_not_fit_is_a_result_which_every_command_knows(tmp_path):
    cli = Cli(tmp_path)
    cli.write("batches.py", STUDY)
    output = cli.done("study", "batches.py", "--no-ray")
    trials = re.findall(r"batch_size=(\d+) #(\d)  (trained|DOES NOT FIT: (?:not run: )?)", output)
    assert sorted(trials) == [
        ("512", "1", "DOES NOT FIT: "),
        ("512", "2", "DOES NOT FIT: not run: "),
        ("64", "1", "trained"),
        ("64", "2", "trained"),
    ]
    assert "2 do not fit" in output and re.search(r"^ *512 +does not fit ", output, re.MULTILINE)
    assert report_in(cli.done("study", "batches.py", "--no-ray")) == report_in(output)  # runs nothing again

    shown = json.loads(cli.done("store", "show", "batches", "--json"))["trials"]
    assert {(t["point"]["batch_size"], t["state"]) for t in shown} == {(64, "finished"), (512, "does not fit")}
    assert all(t["reason"].endswith("more than max_memory=6.00 MB") for t in shown if t["state"] == "does not fit")
    (listed,) = json.loads(cli.done("list", "--json"))["studies"]
    counts = listed["counts"]
    assert (counts["num_finished"], counts["num_does_not_fit"], counts["num_failed"]) == (2, 2, 0)
    needed = max(t["peak_memory_bytes"] for t in shown if t["state"] == "finished")
    for limit, reasons in ((needed, {64: None, 512: "does not fit"}), (needed - 1, {512: "does not fit"})):
        advice = json.loads(cli.done("recommend", "batches", "--max-memory", f"{limit}B", "--json"))
        excluded = {c["point"]["batch_size"]: c["exclusion"] for c in advice["candidates"]}
        assert excluded.items() >= reasons.items()
    assert excluded[64].startswith("memory above")


def found_by(cli, *words):
    done = cli.run(*words)
    assert done.returncode == 0, done.stderr  # which may warn that the machine is busy
    return json.loads(done.stdout)


@pytest.mark.core
def test_the_largest_batch_is_found_at_each_point_once_and_for_all(tmp_path):
    cli = Cli(tmp_path)
    cli.write("batches.py", STUDY)
    words = ("model", "fit-batch", "batches.py", "--no-ray", "--set", "hidden_size=grid(256,512)", "--json")
    found = found_by(cli, *words)
    points = {point["point"]["hidden_size"]: point for point in found["points"]}
    assert set(points) == {256, 512} and points[256]["batch_size"] > points[512]["batch_size"]
    for point in points.values():
        assert point["peak_bytes"] <= 6e6 and (point["is_final"], point["failure"]) == (True, None)
        assert point["batch_size"] < point["too_large"] <= point["batch_size"] / 0.875 + 1
    shown = json.loads(cli.done("store", "show", "batches-fit-batch", "--json"))["trials"]
    assert len(shown) == sum(point["num_trials"] for point in points.values())
    assert found_by(cli, *words) == found
    assert json.loads(cli.done("store", "show", "batches-fit-batch", "--json"))["trials"] == shown
    # Nothing was trained: there are sizes, and no times to compare.
    report = json.loads(cli.done("report", "batches-fit-batch", "--json"))
    assert {point["time_s"] for point in report["points"]} == {None}
    refused = cli.run("store", "resume", "batches-fit-batch")
    assert refused.returncode == 2 and "raypar model fit-batch batches.py --no-ray" in refused.stderr

    # The largest really fits, and the smallest that was too large does not.
    cli.write("both.py", STUDY.replace('    baseline={"batch_size": 64},\n', ""))
    both = points[512]["batch_size"], points[512]["too_large"]
    cli.done("study", "both.py", "--no-ray", "--repeats", "1", "--set", f"batch_size=grid{both}".replace(" ", ""))
    shown = json.loads(cli.done("store", "show", "both", "--json"))["trials"]
    states = {trial["point"]["batch_size"]: trial["state"] for trial in shown}
    assert states == dict(zip(both, ("finished", "does not fit"), strict=True))
