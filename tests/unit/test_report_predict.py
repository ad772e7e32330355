"""How a prediction is shown: bars that add up, what limits in words, what does not help, on any console."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from raypar.analysis.laws import Scaling
from raypar.errors import RayparError
from raypar.predict.calibration import ObservedPoint, calibrate
from raypar.predict.network import Network, Topology
from raypar.predict.predict import JobSpec, predict
from raypar.predict.step_model import Communication, LayerCost
from raypar.report.predict import BAR_WIDTH, PredictionReport, check_plot_path, plot_of, print_prediction

LAYERS = (LayerCost("a", 4_000_000, 0.3, 0.2), LayerCost("b", 8_000_000, 0.3, 0.2))
POINTS = [ObservedPoint(1, b, (0.002 + b * 1e-4, 0.00205 + b * 1.01e-4)) for b in (64, 256)]
TRAINING = JobSpec(Scaling.STRONG, 256, num_samples=25_600)


def told(training: JobSpec = TRAINING, asked: int = 16, variation: float = 0.0, **how: object) -> PredictionReport:
    calibration = calibrate(POINTS, LAYERS, variation)
    communication = replace(Communication(Network(1e-5, 1e10)), **how)  # type: ignore[arg-type]
    counts = [2**i for i in range(asked.bit_length())]
    sweep = predict(calibration, training, communication, counts)
    return PredictionReport("Study wide", (asked,), calibration, training, communication, sweep, "as given")


def printed(what: PredictionReport, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_prediction(Console(file=file, width=width), what)
    file.flush()
    return raw.getvalue().decode(encoding)


def joined(text: str) -> str:
    return " ".join(text.split())


def bars(text: str) -> list[str]:
    part = text.split("Where the time of a step goes:")[1]
    return [line for line in part.splitlines() if line[:8].strip().replace(",", "").isdigit() and line[7] == " "]


def test_the_parts_of_a_step_fill_a_bar() -> None:
    for how in ({}, {"network": Network(1e-3, 1e8)}, {"overlap": False}):
        found = bars(printed(told(variation=0.1, **how)))
        assert len(found) == 5
        assert {len(line[8:].removesuffix("  *")) for line in found} == {BAR_WIDTH}
    assert "=" not in bars(printed(told()))[0] and "=" in bars(printed(told(network=Network(1e-3, 1e8))))[-1]


def test_only_what_occurs_is_explained() -> None:
    text = printed(told())
    assert "# computing" in text and "waiting for data" not in text and "slowest" not in text
    fed = told(replace(TRAINING, input_samples_per_s=100.0))
    assert ". waiting for data" in printed(fed) and "delivers 100 samples/s" in printed(fed)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (told(network=Network(1e-2, 1e12)), "the latency of the messages limits: "),
        (told(network=Network(0.0, 1e7)), "the bandwidth of the network limits: "),
        (told(replace(TRAINING, input_samples_per_s=1000.0)), "the input pipeline limits: "),
        (told(network=Network(0.0, 1e15)), "the batch is too small: of each step, "),
        (told(asked=1), "With 1 worker computing itself limits."),
        (told(JobSpec(Scaling.WEAK, 256, 25_600), variation=0.2), "the slowest worker limits: "),
    ],
)
def test_what_limits_is_said_in_words(what: PredictionReport, said: str) -> None:
    assert said in joined(printed(what))


def test_more_workers_than_help_or_than_have_a_sample_are_said() -> None:
    assert "are not faster." in joined(printed(told(network=Network(1e-3, 1e9))))
    few = told(replace(TRAINING, batch_size=4))
    assert "More than 4 workers have no sample each of a global batch of 4: they are left out." in joined(printed(few))


def test_assumptions_name_nodes_accumulation_compression_and_missing_intervals() -> None:
    nodes = Topology(8, Network(1e-5, 1e10), Network(2e-5, 1e9))
    how = {"network": nodes, "compression": 0.5, "bucket_bytes": 4 * 2**20, "algorithm": "hierarchical"}
    text = joined(printed(told(replace(TRAINING, accumulation_steps=4), **how)))
    assert "in buckets of 4 MiB, behind the backward pass, compressed to 50 %" in text
    assert "all-reduce in the nodes, then between them; 8 workers a node" in text
    assert "sent once in 4 micro-batches" in text
    assert "not of the model's error" in text
    what = told()
    once = replace(what, calibration=replace(what.calibration, draws=None))
    assert "no intervals: a point ran only once" in joined(printed(once))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("ring", "all-reduce in a ring, on links"),
        ("gloo", "all-reduce in a ring, as gloo does it on CPUs, on links"),
        ("tree", "all-reduce over two trees, on links"),
    ],
)
def test_the_algorithm_is_said_in_words(algorithm: str, said: str) -> None:
    assert said in joined(printed(told(algorithm=algorithm)))


def test_a_console_without_such_characters_gets_plain_ones() -> None:
    text = printed(told(), encoding="ascii")
    assert "us" in text and "x" in text and "?" not in text


def test_narrow_consoles_lose_no_number() -> None:
    text = printed(told(), width=60)
    assert "…" not in text and "27.8 ms" in text and "9.22k" in text


def test_the_plot_has_the_predicted_and_the_ideal_curve_and_what_was_measured() -> None:
    above, below = plot_of(told(asked=64)).spec["vconcat"]
    rows = above["data"]["values"]
    assert {row["series"] for row in rows} == {"predicted", "extrapolated", "ideal"}
    assert [row["workers"] for row in rows if row["series"] == "predicted"] == [1]  # of one worker alone
    extrapolated = [row["workers"] for row in rows if row["series"] == "extrapolated"]
    assert extrapolated[0] == 1 and extrapolated[-1] == 64 and len(extrapolated) > 40
    assert [row["workers"] for row in above["layer"][1]["data"]["values"]] == [1]
    assert all(row["efficiency"] <= 1 for row in below["data"]["values"])


def test_a_plot_needs_a_known_format_and_a_folder(tmp_path: Path) -> None:
    check_plot_path(tmp_path / "curve.svg")
    for path, problem in (
        (tmp_path / "curve", "no such format"),
        (tmp_path / "no" / "curve.png", "there is no folder"),
    ):
        with pytest.raises(RayparError, match=problem) as caught:
            check_plot_path(path)
        assert caught.value.hint
