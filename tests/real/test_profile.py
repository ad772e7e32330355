"""Profiles of real ranks: what they record, what is made of it, and what the command line shows of it."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import Cli, report_in, runs_of
from mlflow import MlflowClient
from ranks import Reports, on_ranks
from torch import Tensor, nn

from raypar import Workload
from raypar.analysis.breakdown import BACKWARD, BUBBLE, COMMUNICATION, FORWARD, OPTIMIZER, PARTS, Profile, profile_of
from raypar.parallel.strategy import DistContext
from raypar.study.options import resolve
from raypar.train.job import NO_PROFILING, Profiling
from raypar.train.loop import train
from raypar.workloads import digits, wide_mlp

SIZE: Mapping[str, Any] = {"batch_size": 64, "width": 64, "num_layers": 3}


def recorded_by(
    context: DistContext,
    workload: Workload,
    profiling: Profiling,
    chosen: Mapping[str, Any],
    folder: Path | None = None,
) -> tuple[Mapping[str, Any], list[dict[str, float]]]:
    """Return what a rank records of a training, and its reports."""
    reports = Reports()
    config = resolve(workload, {"epochs": 1, **chosen, "num_workers": context.world_size})
    outcome = train(workload, config, 0, context, reports, start_s=0.0, artifact_dir=folder, profiling=profiling)
    return outcome.profile, list(reports)


def profiled(
    chosen: Mapping[str, Any], workload: Workload = wide_mlp, num_ranks: int = 2, num_steps: int = 8
) -> Profile:
    """Return the profile of a trial that does nothing else."""
    profiling = Profiling(num_steps, instead_of_training=True)
    recordings = on_ranks(lambda context: recorded_by(context, workload, profiling, chosen), num_ranks)
    config = resolve(workload, {**chosen, "num_workers": num_ranks})
    profile = profile_of([recorded for recorded, _ in recordings], config)
    assert profile is not None
    for rank in profile.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.step_s)
        assert all(seconds >= 0 for seconds in rank.parts.values())
    return profile


class Slow(nn.Module):
    """Does a rank's share of the work again and again on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.hidden(x))
        if dist.is_initialized() and dist.get_rank() == 1:
            with torch.no_grad():
                for _ in range(300):
                    torch.mm(x.T, x)
        return self.last(x)


def test_a_profile_comes_after_the_training_which_it_leaves_as_it_is(tmp_path: Path) -> None:
    chosen = {"hidden_size": 32, "batch_size": 256}

    def both(context: DistContext) -> tuple[Any, Any]:
        plain = recorded_by(context, digits, NO_PROFILING, chosen)
        return plain, recorded_by(context, digits, Profiling(4), chosen, tmp_path)

    for (nothing, plain), (profile, reports) in on_ranks(both, 2):
        assert not nothing
        assert [r["train_loss"] for r in reports] == [r["train_loss"] for r in plain]
        assert len(profile["profiled_step_times_s"]) == len(profile["step_times_s"]) == 4
        names = [name for name, _, _ in profile["spans"]]
        assert names.count("step") == names.count("data") == names.count("forward") == names.count("optimizer") == 4
        assert names.count("gloo:all_reduce") >= 4
        assert profile["shares_clock"]
        assert profile["peak_flops"] > 0
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "rank0.trace.json.gz",
        "rank1.trace.json.gz",
    ]
    for path in (tmp_path / "profile").iterdir():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"raypar:step", "raypar:data", "raypar:forward", "raypar:backward", "gloo:all_reduce"} <= names


def test_one_rank_computes_and_waits_for_nobody() -> None:
    profile = profiled(SIZE, num_ranks=1)
    (rank,) = profile.ranks
    assert all(rank.parts[part] > 0 for part in (FORWARD, BACKWARD, OPTIMIZER))
    assert rank.hidden_share is None and not rank.waits_for
    assert profile.utilisation is not None and 0 < profile.utilisation < 1


def test_who_is_fast_waits_for_who_is_slow() -> None:
    slow = replace(digits, name="slow", model=lambda config: Slow())
    profile = profiled({"batch_size": 256}, slow)
    fast, late = profile.ranks
    assert fast.waits_for.get(1, 0.0) > 3 * late.waits_for.get(0, 0.0)
    assert fast.waits_for[1] > fast.parts[FORWARD]
    assert late.parts[FORWARD] > 3 * fast.parts[FORWARD]


def test_without_overlap_hardly_any_communication_is_hidden() -> None:
    share = profiled({**SIZE, "width": 512, "overlap": False}, num_steps=12).mean.hidden_share
    assert share is not None and share < 0.2


def test_a_pipeline_has_a_bubble_and_no_collectives() -> None:
    profile = profiled({**SIZE, "strategy": "pipeline"})
    assert all(rank.parts[BUBBLE] > 0 for rank in profile.ranks)
    assert all(rank.parts[FORWARD] > 0 and rank.parts[BACKWARD] > 0 for rank in profile.ranks)
    assert profile.utilisation is not None  # of the whole model, counted once


@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "gather_broadcast", "local_sgd"])
def test_every_strategy_can_be_looked_into(strategy: str) -> None:
    profile = profiled({**SIZE, "strategy": strategy, "sync_every": 4})
    assert all(rank.parts[COMMUNICATION] > 0 for rank in profile.ranks)
    assert profile.utilisation is not None


STUDY = '''
"""Where does a tiny network spend its time?"""
from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=2,
    config={"epochs": 1, "batch_size": 256, "hidden_size": 32},
)
'''


@pytest.mark.ray
def test_a_study_with_profile_tells_where_the_time_goes_now_and_from_the_store(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.write("tiny.py", STUDY)
    done = cli.run("study", "tiny.py", "--profile")
    assert (done.returncode, done.stderr) == (0, "")
    section = done.stdout[done.stdout.index("Where a step's time goes") :]
    assert len(re.findall(r"^  num_workers=[12] .* %$", section, re.MULTILINE)) == 2
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    for run in runs_of(tmp_path, "tiny", "trial"):
        was_looked_into = run.data.tags["raypar.repeat"] == "0"
        assert ("profile/backward_s" in run.data.metrics) == was_looked_into
        files = {file.path for file in client.list_artifacts(run.info.run_id, "profile")}
        num_ranks = int(run.data.params["num_workers"]) if was_looked_into else 0
        traces = {f"profile/rank{rank}.trace.json.gz" for rank in range(num_ranks)}
        assert files == (traces | {"profile/breakdown.json"} if was_looked_into else set())
        if was_looked_into:
            metrics = run.data.metrics
            parts = sum(metrics[f"profile/{part}_s"] for part in PARTS)
            assert parts == pytest.approx(metrics["profile/step_s"])
    report = cli.run("report", "tiny")
    assert report_in(report.stdout) == report_in(done.stdout)
    cli.wait_for_its_processes()


def test_raypar_profile_shows_one_point_and_leaves_the_studys_own_trials_alone(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.write("tiny.py", STUDY)
    done = cli.run("profile", "tiny.py", "--no-ray", "--set", "num_workers=2", "--steps", "6")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^ +rank 0 +rank 1$", done.stdout, re.MULTILINE)
    assert re.search(r"^backward pass +[\d.]+ ms +\d+ %", done.stdout, re.MULTILINE)
    assert "Model FLOP utilisation: " in done.stdout and "without the profiler" in done.stdout
    (folder,) = (tmp_path / ".raypar").glob("logs/*/*/artifacts/profile")
    assert f"Traces: {folder.relative_to(tmp_path)} " in done.stdout
    assert {path.name for path in folder.iterdir()} == {
        "breakdown.json",
        "rank0.trace.json.gz",
        "rank1.trace.json.gz",
    }
    assert cli.run("list").stdout.count("tiny-profile") == 1
    assert cli.run("report", "tiny").returncode == 2  # it has no trial of its own
    cli.wait_for_its_processes()


@pytest.mark.parametrize("steps", ["0", "-3", "1001"])
def test_a_wrong_number_of_steps_is_told(tmp_path: Path, steps: str) -> None:
    cli = Cli(tmp_path)
    cli.write("tiny.py", STUDY)
    done = cli.run("profile", "tiny.py", "--no-ray", "--steps", steps)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == f"error: --steps {steps}: must be from 1 to 1000"
