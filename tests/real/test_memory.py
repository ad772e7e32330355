"""Memory as a result, from the shell: trials that do not fit, and the largest batch that fits."""

import json
import re

import pytest
from harness import digits_study, report_in

FIELDS = {"num_repeats": 2, "config": {"epochs": 1, "hidden_size": 512, "max_memory": "6MB"}}
STUDY = digits_study('{"batch_size": grid(64, 512)}', baseline={"batch_size": 64}, **FIELDS)


def test_every_command_handles_a_point_that_does_not_fit(cli):
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
    assert report_in(cli.done("study", "batches.py", "--no-ray")) == report_in(output)  # no trial runs again

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
    assert done.returncode == 0, done.stderr  # standard error may warn that the machine is busy
    return json.loads(done.stdout)


@pytest.mark.core
def test_fit_batch_finds_the_largest_batch_of_each_point_once(cli):
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
    # Nothing was trained, so there are no times.
    report = json.loads(cli.done("report", "batches-fit-batch", "--json"))
    assert {point["time_s"] for point in report["points"]} == {None}
    refused = cli.run("store", "resume", "batches-fit-batch")
    assert refused.returncode == 2 and "raypar model fit-batch batches.py --no-ray" in refused.stderr

    # The largest really fits, and the smallest that was too large does not.
    cli.write("both.py", digits_study('{"batch_size": grid(64, 512)}', **FIELDS))
    both = points[512]["batch_size"], points[512]["too_large"]
    cli.done("study", "both.py", "--no-ray", "--repeats", "1", "--set", f"batch_size=grid{both}".replace(" ", ""))
    shown = json.loads(cli.done("store", "show", "both", "--json"))["trials"]
    states = {trial["point"]["batch_size"]: trial["state"] for trial in shown}
    assert states == dict(zip(both, ("finished", "does not fit"), strict=True))
