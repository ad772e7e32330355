"""``raypar model predict``: flags, sources and refusals; tests/golden has whole predictions."""

import json
from dataclasses import replace

import pytest
from command import joined, raypar, refused
from recording import recorded
from results import make_result, stored_conditions

from raypar import workloads
from raypar.analysis.question import Question
from raypar.cli.candidates import NetworkFlags, PredictRequest, of_study
from raypar.study.options import resolve
from raypar.track.store import default_tracking_uri

STEP_S = {(1, 64): 0.0104, (1, 256): 0.0296, (2, 64): 0.009, (2, 256): 0.0186, (4, 256): 0.0142}
LOST = {"workload": "of a file that is gone"}


def trial(num_workers, batch_size, repeat, step_s, *, workload="digits", **chosen):
    point = {"num_workers": num_workers, "batch_size": batch_size}
    config = {**resolve(workloads.digits, {**point, "hidden_size": 128, "epochs": 2, **chosen}), "device": "cpu"}
    times_s = (tuple(step_s * factor for factor in (0.97, 1.0, 1.03, 1.0)),) * num_workers
    time_s = 2 * 1024 / batch_size * step_s
    made = make_result(point, repeat, time_s, num_samples=2 * 1024, config=config, step_times_s=times_s)
    return replace(made, spec=replace(made.spec, workload=workload))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a store of some studies."""
    folder = tmp_path_factory.mktemp("project")
    outside = tmp_path_factory.mktemp("outside") / "study.py"
    outside.write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    factors = tuple(enumerate((0.99, 1.0, 1.02)))
    stored = {
        "scaled": [trial(n, b, r, step_s * f) for r, f in factors for (n, b), step_s in STEP_S.items()],
        "lost": [trial(1, 64, 0, 0.01, **LOST)],
        "elsewhere": [trial(1, 64, 0, 0.01, **LOST)],
        "wide": [trial(n, 64, 0, 0.01) for n in (2, 4)],
        "piped": [trial(1, 64, 0, 0.01, strategy="pipeline")],
    }
    busy = {"cores": [[0]], "foreign_cpu_share": [0.5]}
    stored["disturbed"] = [replace(r, conditions=stored_conditions(busy)) for r in stored["scaled"]]
    slow = {(1, 64): 0.0104, (1, 256): 0.0592, (2, 64): 0.009, (2, 256): 0.0166, (4, 256): 0.0142}
    stored["contradicted"] = [trial(n, b, r, step_s * f) for r, f in factors for (n, b), step_s in slow.items()]
    doubled = [
        replace(r, conditions=stored_conditions(busy), train_time_s=2 * r.train_time_s) for r in stored["scaled"][:2]
    ]
    stored["partly"] = [*doubled, *stored["scaled"][2:]]
    (folder / "times.csv").write_text("workers,time\n1,10\n2,6\n")
    for name, results in stored.items():
        resume = {"file": str(outside)} if name == "elsewhere" else {}
        recorded(folder, Question(name, {"num_workers": 1}, ("num_workers",)), results, resume=resume)
    return folder


@pytest.fixture(autouse=True)
def in_the_project(project, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(project)


def predicted(flags, name="scaled"):
    code, out, err = raypar("model", "predict", name, *flags.split())
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out
    return joined(out)


def document(*args):
    code, out, err = raypar(*args, "--json")
    assert code == 0, err
    return json.loads(out)


POINT = "--set batch_size=256 "
NODES = POINT + "--workers 16 --nodes-of 4 --network 100Gbit "


@pytest.mark.parametrize(
    ("flags", "words", "absent"),
    [
        (
            NODES,
            "16 workers on 4 nodes, batch 256: |4 workers per node, links of 10.0 µs and 10.0 GB/s within it, and a "
            "shared link of 20.0 µs and 11.8 GB/s to other nodes|in buckets of 25 MiB, the first of 1 MiB (torch's "
            "own), during the backward pass|shared out among the layers by counted work|"
            "the links within a node were not given|its steps vary by 2.4 %",
            "",
        ),
        (
            NODES + "--bucket-mb 0 --no-overlap --algorithm tree --network-within 50GB/s,2us",
            "are sent one by one, after the backward pass|over two trees; 4 workers per node, links of 2.0 µs",
            "was not given",
        ),
        (POINT + "--workers 8 --network 1Gbit", "in gloo's ring on CPUs", ""),
        (POINT + "--workers 8 --network 1Gbit --nodes-of 2", "the fastest of ring, tree and hierarchical", ""),
        (POINT + "--workers 4", "fitted to the steps of 2, 4 workers|all-reduce in a ring|14.2 ms", "xtrapolated:"),
        (
            POINT + "--workers 4 --bucket-mb 0",
            "sent one by one|buckets or overlap differ|Extrapolated (*): other buckets, overlap or algorithm than",
            "",
        ),
        (POINT + "--workers 4 --algorithm tree", "over two trees|Extrapolated (*): other buckets", "or overlap differ"),
        (
            POINT + "--workers 4 --overlap --algorithm ring",
            "during the backward pass|14.2 ms",
            "differ from|xtrapolated:",
        ),
        (
            "--set per_worker_batch_size=64 --workers 4096 --network 1Gbit,5ms --scaling weak --input-rate 1000",
            "weak scaling: each worker's batch is 64|4,096 workers on 4,096 nodes, batch 262,144|"
            "delivers 1.00k samples/s",
            "",
        ),
    ],
    ids=[
        "nodes",
        "sending",
        "gloo",
        "few nodes",
        "fitted",
        "other buckets",
        "other algorithm",
        "as in the study",
        "weak",
    ],
)
def test_flags_and_their_defaults_are_shown(flags, words, absent):
    text = predicted(flags)
    assert [word for word in words.split("|") if word not in text] == []
    assert [word for word in absent.split("|") if word and word in text] == []


def test_disturbed_trials_are_not_used_for_calibration():
    text = predicted(POINT + "--workers 8 --network 1Gbit", "partly")
    assert "2 of 15 trials were disturbed by other load and are not used" in text and "at most 0." in text


def test_a_plot_is_drawn_into_a_file(project):
    for name, begins in (("curve.png", b"\x89PNG"), ("curve.svg", b"<svg")):
        predicted(NODES + f"--plot {name}")
        assert (project / name).read_bytes().startswith(begins)


def test_the_size_of_a_missing_network_can_be_given():
    text = predicted("--workers 2 --network 1Gbit --parameters 25.6M", "lost")
    assert "102 MB of gradients of 1 layer" in text and "the layers are not known" in text


@pytest.mark.parametrize(
    ("study", "flags", "message"),
    [
        ("scalde", "", "no study `scalde` in the store"),
        ("scaled", "", "the trials differ in their batch: 64, 256"),
        ("scaled", "--set lr=7", "no finished trial with lr=7"),
        ("scaled", "--set num_workers=4", "worker counts are predicted"),
        ("scaled", "--set batch_size=1,2", "several values"),
        ("scaled", "--set batch_size", "lacks `=`"),
        ("scaled", "--network fast", "'fast' is not a bandwidth"),
        ("scaled", "--network-within 1GB/s", "a node of one worker has no links within"),
        ("scaled", POINT + "--input-rate 0", "--input-rate 0.0: must be greater than 0"),
        ("scaled", POINT + "--plot nowhere/curve.png", "nowhere/curve.png: can't be written"),
        ("scaled", POINT + "--parameters many", "must be a positive number of parameters"),
        ("scaled", "--workers 8,", "--workers"),
        ("scaled", "--workers 99999999", "--workers"),
        ("disturbed", POINT + "--network 1Gbit", "other load disturbed all trials of one worker (15 of 15 trials"),
        ("scaled", POINT + "--workload digits", "--workload and --samples-per-s belong together"),
        ("times.csv", POINT, "--set batch_size=256 is for studies, and times.csv is a table"),
        ("missing.csv", "", "missing.csv"),
        ("scaled", POINT + "--workers 8..x", "must be a list of counts"),
    ],
)
def test_bad_input_is_refused_without_running_foreign_files(study, flags, message, project):
    refused(message, "model", "predict", study, "--workers", "8", *flags.split())
    assert not list(project.parent.glob("*/ran"))


@pytest.mark.parametrize(
    ("study", "flags", "reason"),
    [
        ("wide", "--network 1Gbit", "no trial of one worker"),
        ("contradicted", POINT + "--network 1Gbit", "so it gives no bound: 2 workers, batch 256 took 16.6 ms per step"),
        ("lost", "--network 1Gbit", "its network can't be inspected"),
        ("lost", "--parameters 1M", "the study has no data on a network"),
        ("piped", "--network 1Gbit", "strategy=pipeline: the step model only covers"),
        ("elsewhere", "--network 100Gbit", "not in this folder"),  # a store's file is run only from there
    ],
)
def test_without_a_step_model_the_range_remains_and_the_reason_is_shown(study, flags, reason, project):
    text = predicted(f"--workers 8 {flags}", study)
    assert "8 workers" in text and "at best" not in text.lower().replace("`at best` is the upper bound", "")
    assert "no bound of the step model: " in text and reason in text
    assert not list(project.parent.glob("*/ran"))


def test_a_measured_count_narrows_the_range_of_a_table(project):
    widths = []
    for rows in ("1,100", "1,100\n2,190", "1,100\n2,190\n4,350"):
        (project / "rates.csv").write_text(f"gpus,images/sec\n{rows}\n")
        (candidate,) = document("model", "predict", "rates.csv", "--workers", "16")["candidates"]
        efficiency = candidate["expected"][-1]["efficiency"]
        widths.append(efficiency["high"] - efficiency["low"])
    assert widths[0] > 1.5 * widths[1] and widths[1] > widths[2]
    assert {e["num_workers"] for e in candidate["expected"] if e["measured_rate"]} == {1, 2, 4}


def test_a_published_rate_of_one_worker_gets_a_bound_and_a_range_below_it():
    flags = "--workload digits --samples-per-s 5000 --workers 8..64 --nodes-of 8 --network 25Gbit"
    (candidate,) = document("model", "predict", *flags.split())["candidates"]
    assert [e["num_workers"] for e in candidate["expected"]] == [1, 2, 4, 8, 16, 32, 64]
    one, *more = candidate["expected"]
    assert one["rate"]["value"] == pytest.approx(5000)
    assert all(e["efficiency"]["high"] <= e["at_best"]["efficiency"]["value"] for e in more)
    assert [e["num_nodes"] for e in more] == [1, 1, 1, 2, 4, 8]


def test_a_count_that_is_left_out_does_not_narrow_its_own_range(project):
    network = NetworkFlags(None, 1, None, None, None, None)
    asked = PredictRequest((4,), ("batch_size=256",), None, None, None, network)
    every, others = (of_study("scaled", asked, default_tracking_uri(project), out).outlook for out in ((), (4,)))
    assert (every.num_measured, others.num_measured) == (3, 2)
    wide, narrow = (outlook.expected[-1].efficiency for outlook in (others, every))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low) and others.expected[-1].measured is None


def test_candidates_are_compared_at_the_largest_count(project):
    (project / "good.csv").write_text("gpus,images/sec\n1,100\n2,199\n4,396\n")
    (project / "poor.csv").write_text("gpus,images/sec\n1,100\n2,110\n4,115\n")
    _, out, _ = raypar("model", "predict", "poor.csv", "good.csv", "--workers", "8")
    assert "Efficiency with 8 workers: good.csv: 9" in joined(out) and "overlap" not in out
