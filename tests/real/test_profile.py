"""Profiles of real ranks: their records, their display on the command line, and probed networks."""

import gzip
import json
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import client_of, digits_study, report_in, runs_of
from ranks import Reports, on_ranks
from torch import nn

from raypar.errors import RayparError
from raypar.measure.breakdown import profile_of
from raypar.predict.network import all_reduce_cost, fit_network
from raypar.predict.probe import probe_all_reduces
from raypar.study.options import resolve
from raypar.study.profile import BACKWARD, BUBBLE, COMMUNICATION, FORWARD, OPTIMIZER, PARTS
from raypar.train.affinity import allowed_cores
from raypar.train.job import NO_PROFILING, Profiling
from raypar.train.loop import train
from raypar.workloads import digits, wide_mlp

SIZE = {"batch_size": 64, "width": 64, "num_layers": 3}
TRACES = ["rank0.trace.json.gz", "rank1.trace.json.gz"]


def recorded_by(context, workload, how, chosen, folder=None):
    """Return a rank's recorded profile of a training, and its reports."""
    reports = Reports()
    config = resolve(workload, {"epochs": 1, **chosen, "num_workers": context.world_size})
    outcome = train(workload, config, 0, context, reports, start_s=0.0, artifact_dir=folder, profiling=how)
    return outcome.profile, reports


def profiled(chosen, workload=wide_mlp, num_ranks=2, steps=8):
    """Return the profile of a trial that only records one."""
    how = Profiling(steps, instead_of_training=True)
    recordings = on_ranks(lambda context: recorded_by(context, workload, how, chosen)[0], num_ranks)
    profile = profile_of(recordings, resolve(workload, {**chosen, "num_workers": num_ranks}))
    for rank in profile.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.step_s)
        assert all(seconds >= 0 for seconds in rank.parts.values())
    return profile


class Slow(nn.Module):
    """Repeat a rank's share of the work on rank 1."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x):
        x = torch.relu(self.hidden(x))
        if dist.is_initialized() and dist.get_rank() == 1:
            with torch.no_grad():
                for _ in range(300):
                    torch.mm(x.T, x)
        return self.last(x)


def test_profiling_does_not_change_the_training(tmp_path):
    chosen = {"hidden_size": 32, "batch_size": 256}

    def both(context):
        plain = recorded_by(context, digits, NO_PROFILING, chosen)
        return plain, recorded_by(context, digits, Profiling(4), chosen, tmp_path)

    for (nothing, plain), (profile, reports) in on_ranks(both, 2):
        assert nothing is None
        assert [r["train_loss"] for r in reports] == [r["train_loss"] for r in plain]
        assert len(profile.profiled_step_times_s) == len(profile.step_times_s) == 4
        names = [name for name, _, _ in profile.spans]
        assert names.count("step") == names.count("data") == names.count("forward") == names.count("optimizer") == 4
        assert names.count("gloo:all_reduce") >= 4
        assert profile.shares_clock
        assert profile.peak_flops > 0
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == TRACES
    for name in TRACES:
        events = json.loads(gzip.decompress((tmp_path / "profile" / name).read_bytes()))["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"raypar:step", "raypar:data", "raypar:forward", "raypar:backward", "gloo:all_reduce"} <= names


def test_a_single_rank_waits_for_no_other():
    profile = profiled(SIZE, num_ranks=1)
    (rank,) = profile.ranks
    assert all(rank.parts[part] > 0 for part in (FORWARD, BACKWARD, OPTIMIZER))
    assert rank.hidden_share is None and not rank.waits_for
    assert profile.utilisation is not None and 0 < profile.utilisation < 1


def test_a_fast_rank_waits_for_a_slow_one():
    slow = replace(digits, name="slow", model=lambda config: Slow())
    profile = profiled({"batch_size": 256}, slow)
    fast, late = profile.ranks
    assert fast.waits_for.get(1, 0.0) > 3 * late.waits_for.get(0, 0.0)
    assert fast.waits_for[1] > fast.parts[FORWARD]
    assert late.parts[FORWARD] > 3 * fast.parts[FORWARD]


def test_little_communication_is_hidden_without_overlap():
    share = profiled({**SIZE, "width": 512, "overlap": False}, steps=12).mean.hidden_share
    assert share is not None and share < 0.5  # a few per cent on a quiet machine


@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "gather_broadcast", "local_sgd", "pipeline"])
def test_every_strategy_can_be_profiled(strategy):
    profile = profiled({**SIZE, "strategy": strategy, "sync_every": 4})
    waits = BUBBLE if strategy == "pipeline" else COMMUNICATION
    assert all(rank.parts[part] > 0 for rank in profile.ranks for part in (waits, FORWARD, BACKWARD))
    assert profile.utilisation is not None  # of the whole model, counted once


STUDY = digits_study(
    '{"num_workers": grid(1, 2)}',
    baseline={"num_workers": 1},
    num_repeats=2,
    config={"epochs": 1, "batch_size": 256, "hidden_size": 32},
)


@pytest.fixture
def cli(cli):
    cli.write("tiny.py", STUDY)
    return cli


def test_a_profiled_study_shows_where_a_steps_time_goes(cli):
    output = cli.done("study", "tiny.py", "--profile", "--no-ray")
    for shown in (output, cli.done("report", "tiny", "--verbose")):
        section = shown[shown.index("Where a step's time goes") :]
        assert len(re.findall(r"^  num_workers=[12] .* %$", section, re.MULTILINE)) == 2
    for run in runs_of(cli.folder, "tiny", "trial"):
        files = {file.path for file in client_of(cli.folder).list_artifacts(run.info.run_id, "profile")}
        if run.data.tags["raypar.repeat"] != "1":
            assert not files and "profile/backward_s" not in run.data.metrics
            continue
        assert files == {
            f"profile/{name}" for name in ("breakdown.json", *TRACES[: int(run.data.params["num_workers"])])
        }
        parts = sum(run.data.metrics[f"profile/{part}_s"] for part in PARTS)
        assert parts == pytest.approx(run.data.metrics["profile/step_s"])
    short = report_in(cli.done("report", "tiny"))
    assert report_in(output).startswith(short) and "Where a step's time goes" not in short


def test_model_profile_shows_one_point_and_keeps_the_studys_trials_unchanged(cli):
    output = cli.done("model", "profile", "tiny.py", "--no-ray", "--set", "num_workers=2", "--steps", "6")
    assert re.search(r"^ +rank 0 +rank 1$", output, re.MULTILINE)
    assert re.search(r"^backward pass +[\d.]+ ms +\d+ %", output, re.MULTILINE)
    assert "Model FLOP utilisation: " in output and "without the profiler" in output
    (folder,) = (cli.folder / ".raypar").glob("logs/*/*/artifacts/profile")
    assert f"Traces: {folder.relative_to(cli.folder)} " in output
    assert sorted(path.name for path in folder.iterdir()) == ["breakdown.json", *TRACES]
    assert cli.done("list").count("tiny-profile") == 1
    assert cli.run("report", "tiny").returncode == 2  # it has no trial of its own


def test_all_reduces_between_two_ranks_measure_a_network(tmp_path):
    samples = probe_all_reduces(2, tmp_path)
    assert len(samples) > 4 and all(seconds > 0 for _, seconds in samples)
    largest, seconds = samples[-1]
    # A busy machine spoils single sizes, not the order of magnitude.
    assert seconds / 10 < all_reduce_cost(largest, 2, fit_network(samples, 2)).total_s < 10 * seconds


def test_all_reduces_between_more_ranks_than_cores_are_refused_with_a_hint(tmp_path):
    with pytest.raises(RayparError, match="can't be measured on") as caught:
        probe_all_reduces(len(allowed_cores()) + 1, tmp_path)
    assert caught.value.hint and "--network" in caught.value.hint and not list(tmp_path.iterdir())
