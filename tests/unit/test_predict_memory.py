"""Predicted peak memory: against sizes by hand, and against the allocations of trainings in this process."""

import json

import pytest
import torch
import torch.distributed as dist
from command import raypar, refused
from torch import nn
from training import ALONE

from raypar import Data, Split, Workload
from raypar.predict.memory import NotPredictable, PeakMemory
from raypar.predict.script_shapes import predict_script_memory
from raypar.predict.shapes import predict_memory
from raypar.study.memory_fit import MemoryFit, fit_of
from raypar.study.options import resolve
from raypar.train.training import Training
from raypar.workloads import digits, transformer, wide_mlp

WIDTH, NUM_LAYERS = 256, 8
MLP_BYTES = 4 * NUM_LAYERS * (WIDTH + 1) * WIDTH


def mlp(config):
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def rows(num, width=WIDTH):
    return Split(torch.zeros(num, width), torch.zeros(num, dtype=torch.long))


def workload(model=mlp, num_train=64, num_val=8, **parts):
    data = Data(train=rows(num_train), val=rows(num_val), **parts)
    return Workload(name="w", model=model, data=lambda config: data)


def predicted(workload, **config):
    return predict_memory(workload, resolve(workload, {"device": "cpu", **config}))


def measured(workload, **config):
    training = Training(workload, resolve(workload, {"device": "cpu", **config}), 0, ALONE)
    training.warm_up()
    return training.memory.peak_bytes


def test_the_parts_are_those_computed_by_hand():
    batch_size = 64
    peak = predicted(workload(), batch_size=batch_size, optimizer="sgd", momentum=0.0)
    assert peak.parameters == MLP_BYTES and peak.optimizer == peak.host_copy == 0
    assert peak.inputs == 4 * batch_size * WIDTH + 8 * batch_size + 8 * 64  # inputs, targets, order
    adam = predicted(workload(), batch_size=1, optimizer="adam")  # its peak is in the optimizer's step
    assert adam.gradients == MLP_BYTES and adam.optimizer >= 2 * MLP_BYTES


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "lars"])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_one_worker_needs_what_a_training_allocates(optimizer, batch_size):
    config = {"optimizer": optimizer, "batch_size": batch_size}
    assert predicted(workload(), **config).total == pytest.approx(measured(workload(), **config), rel=0.02)


@pytest.mark.parametrize(
    ("of", "config"),
    [
        (digits, {"hidden_size": 512}),
        (digits, {"precision": "fp64", "hidden_size": 512}),
        (digits, {"accumulation_steps": 4, "batch_size": 512, "hidden_size": 512}),
        (digits, {"clip_grad_norm": 1.0, "hidden_size": 512}),
        (transformer, {}),
        (wide_mlp, {"optimizer": "adam"}),
    ],
)
def test_models_that_ship_with_raypar_need_what_they_allocate(of, config):
    assert predicted(of, **config).total == pytest.approx(measured(of, **config), rel=0.03)


def test_a_batch_of_the_evaluation_is_not_part_of_the_training():
    large = workload(num_val=50_000)
    config = {"batch_size": 4, "eval_batch_size": 50_000}
    assert measured(large, **config) < 4 * 50_000 * WIDTH / 5
    assert predicted(large, **config).total == pytest.approx(measured(large, **config), rel=0.05)


def test_inputs_are_counted_before_and_after_their_transform():
    def as_fractions(pixels):
        return pixels.float() / 255

    few = rows(512)
    data = Data(train=Split((few.inputs * 255).to(torch.uint8), few.targets), val=few, transform=as_fractions)
    of = Workload(name="w", model=lambda config: nn.Linear(WIDTH, 10), data=lambda config: data)
    assert predicted(of, batch_size=512).total == pytest.approx(measured(of, batch_size=512), rel=0.03)


@pytest.mark.parametrize("num_workers", [2, 4, 512])
def test_strategies_split_or_copy_the_model(num_workers):
    def peak(strategy):
        return predicted(workload(num_train=512), strategy=strategy, num_workers=num_workers, batch_size=512)

    ddp, fsdp = peak("ddp"), peak("fsdp")
    assert (ddp.parameters, ddp.gradients, ddp.host_copy) == (MLP_BYTES, MLP_BYTES, 0)
    least = NUM_LAYERS * 4 * (WIDTH + 1)  # the first rank has at least a row of each layer
    assert fsdp.parameters == max(MLP_BYTES // num_workers, least) and fsdp.host_copy == MLP_BYTES
    assert fsdp.temporary + fsdp.activations > 0  # gathered layers
    assert fsdp.uncertain == ddp.uncertain == MLP_BYTES  # messages that may wait
    assert not dist.is_initialized()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_pipelines_worker_has_its_stages_and_their_micro_batches(schedule):
    def peak(num_workers, **config):
        config |= {"strategy": "pipeline", "num_microbatches": 4, "batch_size": 64, "pipeline_schedule": schedule}
        return predicted(workload(), num_workers=num_workers, optimizer="adam", **config)

    two, four = peak(2), peak(4)
    assert two.parameters == MLP_BYTES // 2 and four.parameters == MLP_BYTES // 4
    assert two.host_copy == four.host_copy == MLP_BYTES
    assert two.optimizer + two.temporary >= two.parameters  # of its own stages only
    assert two.total < peak(2, strategy="ddp").total + MLP_BYTES


class DependsOnValues(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs[inputs[:, 0] > -1])


@pytest.mark.parametrize(
    ("of", "config", "problem"),
    [
        (workload(lambda config: DependsOnValues(WIDTH, 10)), {}, "its shapes depend on values"),
        (workload(), {"strategy": "deepspeed", "num_workers": 2}, "strategy=deepspeed can't run without"),
    ],
)
def test_what_can_t_be_predicted_is_refused(of, config, problem):
    before = nn.Module._apply
    with pytest.raises(NotPredictable, match=problem):
        predicted(of, **config)
    assert not dist.is_initialized() and nn.Module._apply is before
    assert torch.zeros(1).item() == 0.0  # tensors have values again


def test_shared_weights_stay_shared():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.last.weight = self.first.weight

        def forward(self, inputs):
            return self.last(self.first(inputs))

    peak = predicted(workload(lambda config: Tied()), precision="fp64")
    assert peak.parameters == 8 * (WIDTH * WIDTH + 2 * WIDTH)


def test_ranges_and_whether_they_fit():
    peak = PeakMemory(parameters=10**9, activations=10**9, host_copy=10**9)
    assert peak.range_bytes(1, on_gpu=False) == (3e9, pytest.approx(3.06e9))
    assert peak.range_bytes(8, on_gpu=False) == (3e9, pytest.approx(3.3e9))
    least, most = peak.range_bytes(8, on_gpu=True)
    assert least == 2.3e9 and most == pytest.approx(3.8e9)
    assert [fit_of((least, most), size) for size in (4e9, 3e9, 2e9)] == [
        MemoryFit.YES,
        MemoryFit.UNCERTAIN,
        MemoryFit.NO,
    ]


PLAIN = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}) for _ in range({NUM_LAYERS})))
"""
LOOP = f"""
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn(512, {WIDTH}), torch.randint({WIDTH}, (512,)))
for epoch in range(3):
    num_right = 0
    for x, y in DataLoader(data, batch_size=64, shuffle=True, num_workers=2):
        optimizer.zero_grad()
        outputs = model(x)
        loss = nn.functional.cross_entropy(outputs, y)
        loss.backward()
        optimizer.step()
        num_right += (outputs.argmax(1) == y).sum().item()
        assert outputs.detach().cpu().numpy().shape == (64, {WIDTH}) and outputs[0].tolist() == [1.0] * {WIDTH}
        print(f"loss {{loss.item():.3f}}", num_right)
        torch.save(model.state_dict(), "trained")
open("trained", "w")
"""
SCRIPTS = {
    "python train.py": PLAIN + LOOP,
    "torchrun --standalone --nproc-per-node={num_workers} train.py": PLAIN
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
assert dist.get_world_size() == 4
model = DistributedDataParallel(model)
"""
    + LOOP,
}


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_is_stopped_before_its_third_step(command, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPTS[command])
    of = Workload.from_command(command).command
    peak = predict_script_memory(of, {"num_workers": 4}, 0, tmp_path)
    assert peak.parameters == peak.gradients == MLP_BYTES and peak.inputs == 4 * 64 * WIDTH
    assert 2 * MLP_BYTES <= peak.optimizer <= 4 * MLP_BYTES and 0 < peak.uncertain < 0.2 * peak.total
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("command", "script", "problem"),
    [
        ("python train.py", PLAIN, "train.py: made no step of an optimizer"),
        ("python train.py", "raise ValueError('no data')", "train.py: ValueError: no data"),
        ("sh train.py", "", "sh does not start a script in the way of python or torchrun"),
    ],
)
def test_other_commands_have_no_prediction(command, script, problem, tmp_path):
    (tmp_path / "train.py").write_text(script)
    with pytest.raises(NotPredictable, match=problem):
        predict_script_memory(Workload.from_command(command).command, {"num_workers": 1}, 0, tmp_path)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers, self.last = kind(28, 64, batch_first=True, num_layers=2), nn.Linear(64, 10)

    def forward(self, rows):
        return self.last(self.layers(rows)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    rows_of_images = Split(torch.randn(64, 28, 28), torch.zeros(64, dtype=torch.long))
    data = Data(train=rows_of_images, val=rows_of_images)
    of = Workload(name="w", model=lambda config: Recurrent(kind), data=lambda config: data)
    peak, needed = predicted(of, batch_size=64), measured(of, batch_size=64)
    least, most = peak.range_bytes(1, on_gpu=False)
    assert 0.98 * least <= needed <= most
    assert peak.total == pytest.approx(needed, rel=0.05)


STUDY = """
from raypar import Study, grid
from raypar.workloads import wide_mlp

study = Study(workload=wide_mlp, name="memory", space={"strategy": grid("ddp", "fsdp", "pipeline")},
    config={"num_workers": 2, "batch_size": 64, "optimizer": "adam"})
"""


def test_the_command_names_the_largest_point_and_what_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.py").write_text(STUDY)
    code, out, err = raypar("model", "memory", "study.py", width=120)
    assert code == 0, err
    assert "at strategy=ddp" in out and "optimizer" in out
    code, out, _ = raypar("model", "memory", "study.py", "--gpu-memory", "2GB", "--json")
    document = json.loads(out)
    assert [point["fit"] for point in document["points"]] == ["fits"] * 3
    assert document["points"][0]["parts"]["parameters"] > document["points"][1]["parts"]["parameters"]
    assert "All 3 points certainly fit into 2.00 GB" in document["answer"]
    assert not list(tmp_path.glob(".raypar*")), "nothing was run"


def test_refusals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.py").write_text(STUDY)
    refused("--gpu-memory 80: must be a positive size", "model", "memory", "study.py", "--gpu-memory", "80")
    (tmp_path / "search.py").write_text(
        STUDY.replace('grid("ddp", "fsdp", "pipeline")', 'choice("ddp", "fsdp")').replace(
            "Study, grid", "Study, choice"
        )
    )
    refused("search.py is a search, which has no fixed points", "model", "memory", "search.py")


BROKEN = """
from raypar import Study, Workload, grid
from raypar.workloads import digits


def build(config):
    raise ValueError("no such architecture")


study = Study(workload=Workload(name="w", model=build, data=digits.data), name="s", space={"lr": grid(0.1, 0.2)})
"""
NO_DATA = """
from raypar import Study, grid
from raypar.workloads import mnist_mlp

study = Study(workload=mnist_mlp, name="s", space={"lr": grid(0.1, 0.2)})
"""


@pytest.mark.parametrize("command", [("model", "memory", "study.py"), ("plan", "study.py", "--gpu-memory", "1GB")])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NO_DATA, "train-images-idx3-ubyte: no such file"),
        (BROKEN, "no memory can be predicted: ValueError: no such architecture"),
        (
            STUDY.replace('grid("ddp", "fsdp", "pipeline")', 'grid("deepspeed")'),
            "no memory can be predicted: strategy=deepspeed can't run without its other ranks",
        ),
    ],
)
def test_one_message_if_no_point_can_be_predicted(command, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    (tmp_path / "study.py").write_text(text)
    refused(message, *command)


FITS = """
from raypar import Study, grid
from raypar.workloads import digits

study = Study(workload=digits, name="fits", space={"hidden_size": grid(64, 10_000_000)})
"""


def test_a_plan_names_the_points_that_do_not_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.py").write_text(FITS)
    code, out, err = raypar("plan", "study.py", "--gpu-memory", "2GB", width=200)
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if "needs" in line]
    assert (
        line.startswith("does not fit: hidden_size=10000000 needs")
        and "TB of 2.00 GB: " in line
        and "parameters 400 TB" in line
    )
    assert "points that certainly fit into 2.00 GB: 1 of 2" in out
    code, out, _ = raypar("plan", "study.py", "--gpu-memory", "2GB", "--json")
    document = json.loads(out)
    assert document["gpu_bytes"] == 2e9 and [each["fit"] for each in document["memory"]] == ["fits", "does not fit"]
    code, out, _ = raypar("plan", "study.py", "--json")
    assert json.loads(out)["memory"] == []


def test_points_without_a_prediction_do_not_hide_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = STUDY.replace('"pipeline"', '"deepspeed"')
    (tmp_path / "study.py").write_text(text)
    code, out, err = raypar("model", "memory", "study.py", width=120)
    assert code == 0, err
    assert "No prediction of memory at strategy=deepspeed: strategy=deepspeed can't run without" in out


@pytest.mark.parametrize("shape", ["256", "16, 16"])
def test_a_scripts_inputs_count_once(shape, tmp_path):
    flatten, batch_size = "nn.Flatten(), " if "," in shape else "", 5000
    (tmp_path / "train.py").write_text(f"""
import torch
from torch import nn

model = nn.Sequential({flatten}nn.Linear(256, 256), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn({batch_size}, {shape})).mean().backward()
    optimizer.step()
""")
    peak = predict_script_memory(Workload.from_command("python train.py").command, {"num_workers": 1}, 0, tmp_path)
    rows_bytes = 4 * 256 * batch_size
    assert peak.inputs == rows_bytes
    weights_bytes = 4 * (257 * 256 + 257)
    # The first layer's results, and their gradient, beside the inputs.
    assert peak.total == pytest.approx(3 * rows_bytes + weights_bytes, rel=0.03)


def test_of_a_pipeline_the_stage_that_needs_the_most_counts(monkeypatch):
    monkeypatch.setattr("raypar.predict.shapes._of_rank", lambda *args: PeakMemory(parameters=args[3]))
    assert predicted(workload(), strategy="pipeline", num_workers=4).parameters == 3
