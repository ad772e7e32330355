"""Profile of a script: kernels of a GPU, operations of a CPU, their kinds, and scripts with few steps."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from raypar.observe.events import EventRecorder
from raypar.observe.profiler import hooks
from raypar.reporting.profile import by_kind, operations_sentence


def average(key, on_cpu_us, on_device_us, device="CPU", **facts):
    kind = SimpleNamespace(name=device)
    return SimpleNamespace(
        key=key, device_type=kind, self_cpu_time_total=on_cpu_us, self_device_time_total=on_device_us, **facts
    )


class FakeProfiler:
    """Stand-in for ``torch.profiler.profile``."""

    averages = ()

    def __init__(self, activities):
        self.activities = activities

    def start(self):
        pass

    def stop(self):
        pass

    def export_chrome_trace(self, path):
        Path(path).write_text("{}")

    def key_averages(self):
        return self.averages


def fake_torch(averages, rank=None):
    activity = SimpleNamespace(CPU="cpu", CUDA="cuda")
    profiler = SimpleNamespace(
        ProfilerActivity=activity, profile=type("Profiler", (FakeProfiler,), {"averages": averages})
    )
    distributed = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: rank is not None, get_rank=lambda: rank
    )
    return SimpleNamespace(
        profiler=profiler, distributed=distributed, cuda=SimpleNamespace(is_initialized=lambda: False)
    )


def profiled(tmp_path, averages, num_steps, rank=None):
    """Return the facts after these steps of a script, of which up to 20 are profiled; step i ends at i seconds."""
    events = tmp_path / "events"
    events.mkdir()
    recorder = EventRecorder(events)
    hooks((str(tmp_path / "traces"), 20))["torch"](fake_torch(averages, rank), recorder)
    for _ in range(num_steps):
        recorder.num_steps += 1
        recorder.last_step_s = float(recorder.num_steps)
        for look in recorder.at_step:
            look()
    recorder.close()
    return recorder.facts


CPU = (average("aten::addmm", 3000, 0), average("aten::copy_", 1000, 0))
GPU = (
    average("aten::addmm", 50, 4000),
    average("ampere_sgemm_128x64_tn", 0, 4000, "CUDA"),
    average("Optimizer.step#SGD.step", 0, 9000, "CUDA", is_user_annotation=True),
    average("void at::native::vectorized_elementwise_kernel<4>", 0, 2000, "CUDA"),
)


@pytest.mark.parametrize(
    ("averages", "times"),
    [
        (CPU, {"aten::addmm": 3e-3, "aten::copy_": 1e-3}),
        (GPU, {"ampere_sgemm_128x64_tn": 4e-3, "void at::native::vectorized_elementwise_kernel<4>": 2e-3}),
    ],
)
def test_the_time_of_each_operation_counts_once(tmp_path, averages, times):
    facts = profiled(tmp_path, averages, 40, rank=1)
    assert dict(facts["operations"]) == pytest.approx(times)
    assert facts["profiled"][0] == 10.0 and not facts["problems"]
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["rank1.trace.json.gz"]


def test_a_script_that_ends_early_has_a_profile_of_its_steps(tmp_path):
    facts = profiled(tmp_path, CPU, 12)
    assert facts["profiled"][0] == 10.0 and dict(facts["operations"])["aten::addmm"] == pytest.approx(3e-3)


@pytest.mark.parametrize("num_steps", [9, 10])
def test_a_script_with_too_few_steps_has_no_profile(tmp_path, num_steps):
    assert "operations" not in profiled(tmp_path, CPU, num_steps)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32", "communication"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("aten::convolution_backward", "convolutions"),
        ("aten::mm", "matrix products"),
        ("sm80_xmma_gemm_f32f32", "matrix products"),
        ("aten::upsample_bilinear2d", "others"),
        ("aten::native_layer_norm", "normalisation"),
        ("aten::normal_", "others"),
        ("aten::cat", "copies"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::_foreach_add_", "optimizer"),
        ("aten::mul", "elementwise operations"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data"),
    ],
)
def test_operations_have_a_kind(name, kind):
    assert by_kind([(name, 1.0)]) == {kind: 1.0}


def test_the_kinds_are_named_the_largest_first():
    sentence = operations_sentence([("aten::copy_", 1.0), ("aten::mm", 3.0), ("aten::cat", 0.01)])
    assert sentence == "Time by kind of operation: matrix products 75 %, copies 25 %."
    assert operations_sentence([]) == ""
