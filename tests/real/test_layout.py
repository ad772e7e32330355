"""``raypar model layout`` from the shell: it runs the leading layouts, and predicts the others."""

import json

import pytest
from harness import digits_study

FIELDS = {"config": {"batch_size": 64, "device": "cpu", "num_samples": 256}}


@pytest.mark.core
def test_the_leading_layouts_run_and_the_others_stay_predictions(cli):
    cli.write("layers.py", digits_study('{"num_workers": grid(1, 2)}', baseline={"num_workers": 1}, **FIELDS))
    words = ("--no-ray", "--max-runs", "2", "--budget", "20s", "--gpu-memory", "80GB", "--network", "1GB/s,50us")
    done = cli.run("model", "layout", "layers.py", *words, "--json")
    assert done.returncode == 0, done.stderr  # standard error may warn that the machine is busy
    found = json.loads(done.stdout)
    ran = [each for each in found["layouts"] if each["measured_s"] is not None]
    assert len(ran) == 2 < found["num_legal"] == len(found["layouts"]) + found["num_excluded"]
    assert {"strategy": "ddp"} in [each["settings"] for each in ran]
    assert all(each["num_trials"] >= 2 and each["predicted_s"] > 0 for each in ran)
    assert all(each["num_trials"] == 0 and each["fit"] == "fits" for each in found["layouts"][2:])
    others = [each["predicted_s"] for each in found["layouts"][2:] if each["predicted_s"] is not None]
    assert others == sorted(others) and others
    shown = json.loads(cli.done("store", "show", "layers_layout", "--json"))["trials"]
    assert {trial["state"] for trial in shown} == {"finished"}
    # A layout's first trial decides whether it is repeated, and is not compared.
    assert len(shown) == sum(each["num_trials"] + 1 for each in ran)
