"""``raypar predict``: a study's results carried on to more workers, in 80 columns, or one message on what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recording import recorded
from results import make_result
from typer.testing import CliRunner

from raypar import workloads
from raypar.analysis.question import Question
from raypar.cli.app import app
from raypar.study.options import resolve
from raypar.study.trial import TrialResult

STEP_S = {(1, 64): 0.0104, (1, 256): 0.0296, (2, 64): 0.009, (2, 256): 0.0186, (4, 256): 0.0142}
ARGS = ("--workers", "16", "--nodes-of", "4", "--network", "100Gbit", "--set", "batch_size=256")


def trial(
    num_workers: int, batch_size: int, repeat: int, step_s: float, *, workload: str = "digits", **chosen: Any
) -> TrialResult:
    point = {"num_workers": num_workers, "batch_size": batch_size}
    config = {**resolve(workloads.digits, {**point, "hidden_size": 128, "epochs": 2, **chosen}), "device": "cpu"}
    times_s = tuple(step_s * factor for factor in (0.97, 1.0, 1.03, 1.0))
    time_s = 2 * 1024 / batch_size * step_s
    made = make_result(
        point, repeat, time_s, num_samples=2 * 1024, config=config, step_times_s=(times_s,) * num_workers
    )
    return replace(made, spec=replace(made.spec, workload=workload))


def workers(name: str) -> Question:
    return Question(name, {"num_workers": 1}, ("num_workers",))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of some studies."""
    folder = tmp_path_factory.mktemp("project")
    scaled = [
        trial(n, b, repeat, step_s * factor)
        for (n, b), step_s in STEP_S.items()
        for repeat, factor in enumerate((0.99, 1.0, 1.02))
    ]
    recorded(folder, workers("scaled"), scaled)
    recorded(folder, workers("lost"), [trial(1, 64, 0, 0.01, workload="of a file that is gone")])
    outside = tmp_path_factory.mktemp("outside") / "study.py"
    outside.write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    elsewhere = [trial(1, 64, 0, 0.01, workload="of a file elsewhere")]
    recorded(folder, workers("elsewhere"), elsewhere, resume={"file": str(outside)})
    recorded(folder, workers("wide"), [trial(n, 64, 0, 0.01) for n in (2, 4)])
    recorded(folder, workers("piped"), [trial(1, 64, 0, 0.01, strategy="pipeline")])
    return folder


@pytest.fixture(autouse=True)
def in_the_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(project)


def predict(*args: str, width: int = 80) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["predict", *args], env={"COLUMNS": str(width)})
    return done.exit_code, done.stdout, done.stderr


def joined(text: str) -> str:
    return " ".join(text.split())


def test_a_row_for_each_worker_count_and_what_is_extrapolated_marked() -> None:
    code, out, err = predict("scaled", *ARGS)
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.split("\n\n")[1].splitlines()}
    assert list(rows) == ["workers", "1", "2", "4", "8", "16"]
    assert rows["1"].split()[-2:] == ["29.6", "ms"] and "100 %" in rows["1"]
    assert rows["4"].endswith("extrapolated")  # it was measured, on another network
    assert rows["16"].endswith("extrapolated")
    text = joined(out)
    assert "16 workers, batch 256: " in text
    assert "Extrapolated (*): more workers than were measured" in text
    assert "another network than was measured" in text


def test_the_assumptions_are_listed() -> None:
    text = joined(predict("scaled", *ARGS)[1])
    assert "strong scaling: the global batch stays 256" in text
    assert "one worker takes 4.0 ms a step and 100 µs a sample" in text
    assert "its steps vary by 2.4 %" in text
    assert "4 workers a node, links of 10.0 µs and 10.0 GB/s within it, and 20.0 µs and 11.8 GB/s" in text
    assert "in buckets of 25 MiB, the first of 1 MiB (torch's own), behind the backward pass" in text
    assert "shared out among the layers by counted work" in text
    assert "what is within a node was not given" in text


def test_flags_change_how_gradients_are_sent() -> None:
    flags = ("--bucket-mb", "0", "--no-overlap", "--algorithm", "tree", "--network-within", "50GB/s,2us")
    text = joined(predict("scaled", *ARGS, *flags)[1])
    assert "are sent one by one, after the backward pass" in text
    assert "all-reduce over two trees; 4 workers a node, links of 2.0 µs and 50.0 GB/s within it" in text
    assert "was not given" not in text


@pytest.mark.parametrize(
    ("nodes", "told"),
    [((), "as gloo does it on CPUs"), (("--nodes-of", "2"), "whichever of ring, tree and hierarchical")],
)
def test_a_cpu_study_on_single_workers_sends_as_gloo_does(nodes: tuple[str, ...], told: str) -> None:
    text = joined(predict("scaled", "--workers", "8", "--network", "1Gbit", "--set", "batch_size=256", *nodes)[1])
    assert told in text


def test_without_a_network_that_of_the_measurements_is_fitted() -> None:
    code, out, _ = predict("scaled", "--workers", "4", "--set", "batch_size=256")
    text = joined(out)
    assert code == 0
    assert next(line for line in out.splitlines() if line.split()[:1] == ["4"]).split()[-2:] == ["14.2", "ms"]
    assert "fitted to the steps of 2, 4 workers" in text and "all-reduce in a ring" in text
    assert "extrapolated" not in text.split("Taken for granted")[0].lower()


def test_weak_scaling_and_its_limits_can_be_asked_for() -> None:
    text = joined(
        predict(
            "scaled", "--workers", "4096", "--network", "1Gbit,5ms", "--scaling", "weak", "--set",
            "per_worker_batch_size=64", "--input-rate", "1000",
        )[1]
    )  # fmt: skip
    assert "weak scaling: every worker has a batch of 64" in text
    assert "4,096 workers, batch 262,144" in text
    assert "delivers 1.00k samples/s" in text


def test_it_fits_80_columns_without_colour() -> None:
    _, out, _ = predict("scaled", *ARGS)
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


def test_a_plot_is_drawn_into_a_file(project: Path) -> None:
    for name, begins in (("curve.png", b"\x89PNG"), ("curve.svg", b"<svg")):
        code, _, err = predict("scaled", *ARGS, "--plot", name)
        assert code == 0 and f"drawn into {name}" in err
        assert (project / name).read_bytes().startswith(begins)


def test_the_counted_layers_are_kept_for_the_next_call(project: Path) -> None:
    first = predict("scaled", *ARGS)[1]
    kept = list((project / ".raypar" / "layers").glob("*.json"))
    assert len(kept) == 1
    assert predict("scaled", *ARGS)[1] == first
    kept[0].write_text("no json")
    assert predict("scaled", *ARGS)[1] == first


def test_the_size_of_a_network_that_is_gone_can_be_given() -> None:
    code, _, err = predict("lost", "--workers", "2", "--network", "1Gbit")
    assert code == 2 and "its network can't be inspected" in joined(err) and "--parameters" in err
    code, out, _ = predict("lost", "--workers", "2", "--network", "1Gbit", "--parameters", "25.6M")
    assert code == 0
    assert "102 MB of gradients of 1 layer" in joined(out) and "the layers are not known" in joined(out)


@pytest.mark.parametrize(
    ("study", "flags", "message"),
    [
        ("scalde", (), "no study `scalde` in the store"),
        ("scaled", (), "the trials differ in their batch: 64, 256"),
        ("scaled", ("--set", "lr=7"), "no finished trial with lr=7"),
        ("scaled", ("--set", "num_workers=4"), "worker counts are predicted"),
        ("scaled", ("--set", "batch_size=1,2"), "several values"),
        ("scaled", ("--set", "batch_size"), "lacks `=`"),
        ("scaled", ("--network", "fast"), "'fast' is no bandwidth"),
        ("scaled", ("--network-within", "1GB/s"), "a node of one worker has no links within"),
        ("scaled", ("--bucket-mb", "-1"), "--bucket-mb -1.0: must be 0 or more"),
        ("scaled", ("--input-rate", "0"), "--input-rate 0.0: must be greater than 0"),
        ("scaled", ("--plot", "curve.gif"), "no such format"),
        ("scaled", ("--plot", "nowhere/curve.png"), "there is no folder nowhere"),
        ("scaled", ("--parameters", "many"), "is no number of parameters"),
        ("wide", ("--network", "1Gbit"), "no trial of one worker was measured"),
        ("lost", ("--parameters", "1M"), "the study tells nothing of a network"),
        ("piped", ("--network", "1Gbit"), "strategy=pipeline: the step model knows"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(study: str, flags: tuple[str, ...], message: str) -> None:
    chosen = () if "--set" in flags or message.startswith("the trials differ") else ("--set", "batch_size=64")
    code, out, err = predict(study, "--workers", "8", *chosen, *flags)
    assert (code, out) == (2, "")
    assert message in joined(err) and "→" in err and "Traceback" not in err


@pytest.mark.parametrize("workers", ["0", "many", "8,", "99999999"])
def test_worker_counts_that_are_none_are_refused(workers: str) -> None:
    code, _, err = predict("scaled", "--workers", workers)
    assert code == 2 and "--workers" in err and "→" in err


def test_a_file_outside_of_this_folder_that_the_store_names_is_not_run(project: Path) -> None:
    code, _, err = predict("elsewhere", "--workers", "4", "--network", "100Gbit")
    assert code == 2 and "not in this folder" in joined(err)
    assert not list(project.parent.glob("*/ran"))
