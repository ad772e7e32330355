"""Models are cut into stages, batches into parts; strategies refuse the models that they can't split."""

import contextlib
import gc
import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy

from raypar import Workload
from raypar.parallel.base import SplitModel, Strategy
from raypar.parallel.deepspeed import DeepSpeed
from raypar.parallel.fsdp import policy_of, units_of
from raypar.parallel.local_sgd import LocalSgd
from raypar.parallel.loss import Loss
from raypar.parallel.pipeline import balanced, layers_of, micro_batches_for, names_of, partition
from raypar.parallel.strategy import (
    Batch,
    DistContext,
    ForwardBackward,
    Task,
    broadcast_buffers,
    check_compatible,
    copied,
    on_device,
    parts_of,
)
from raypar.parallel.tensor import plan_of
from raypar.study.options import resolve
from raypar.study.strategy import STRATEGIES
from raypar.workloads import digits, resnet, transformer, wide_mlp

costs = st.lists(st.floats(0, 1e6), min_size=1, max_size=9)


@given(costs=costs, data=st.data())
def test_no_other_cut_has_a_cheaper_costliest_stage(costs, data):
    num = data.draw(st.integers(1, len(costs)))
    parts = balanced(costs, num)
    assert [i for part in parts for i in part] == list(range(len(costs)))
    assert len(parts) == num and all(len(part) for part in parts)

    def largest(bounds):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *bounds, len(costs))))

    best = min(largest(bounds) for bounds in itertools.combinations(range(1, len(costs)), num - 1))
    assert max(sum(costs[i] for i in part) for part in parts) == pytest.approx(best)


def test_a_cut_by_counted_work_isolates_the_wide_layers_and_leaves_a_batch_norm_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 400), nn.Linear(400, 400), nn.Flatten())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert partition(model, list(model), torch.randn(2, 4), 2, "counted") == [range(3), range(3, 5)]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(layer.training for layer in model)


def test_named_layers_begin_stages():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    for how in (("3", "1"), ("1", "3", "1")):
        assert partition(model, list(model), torch.randn(2, 2), 3, how) == [range(1), range(1, 3), range(3, 5)]


@given(size=st.integers(1, 40), num=st.integers(1, 9))
def test_parts_of_a_batch_are_as_many_as_asked_and_weigh_as_much_as_it(size, num):
    inputs = torch.arange(size)
    parts = list(parts_of(Batch(inputs, inputs, 0.75, size, size), num))
    assert len(parts) == num
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert sum(part.weight for part, _ in parts) == pytest.approx(0.75)
    assert torch.cat([part.inputs for part, share in parts if share]).tolist() == inputs.tolist()
    assert all(len(part.targets) for part, _ in parts)


@given(size=st.integers(1, 12), num=st.integers(1, 6))
def test_gradients_of_parts_add_up_to_those_of_the_batch(size, num):
    generator = torch.Generator().manual_seed(size * 10 + num)
    inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(2, (size,), generator=generator)
    do = ForwardBackward(Loss(nn.functional.cross_entropy), contextlib.nullcontext, lambda loss: loss)
    gradients = []
    for parts in (1, num):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        loss = do.run_in_parts(model, Batch(inputs, targets, 0.5, size, size), parts)
        assert model.weight.grad is not None
        gradients.append(torch.cat([model.weight.grad.flatten(), loss.reshape(1)]))
    torch.testing.assert_close(*gradients)


@given(size=st.integers(1, 300), limit=st.integers(1, 32), ranks=st.integers(1, 8))
def test_micro_batches_are_of_equal_size_and_no_more_than_the_limit(size, limit, ranks):
    num = micro_batches_for(size, limit, ranks)
    assert 1 <= num <= limit and size % num == 0
    if limit <= ranks and size % limit == 0:
        assert num == limit


def test_fully_sharded_units_are_the_members_of_the_outermost_containers_that_have_weights():
    model = nn.Module()
    model.stem = nn.Linear(2, 2)
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    assert units_of(model) == [block[0] for block in model.blocks]
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert units_of(plain) == [plain[0], plain[2]]


class Tied(nn.Module):
    """An embedding that is also the last layer, a batch norm, weights of matrix products, and an unused layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm, self.hidden, self.unused = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.transposed = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        x = self.hidden(self.norm(self.embedding(x).mean(1))) @ self.transposed
        return x @ self.embedding.weight.T


@pytest.mark.skipif(not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"), reason="needs torch 2.15")
def test_in_mixed_precision_fsdp_gathers_the_weights_that_only_autocast_reads_in_16_bits():
    config = resolve(Workload(name="own"), {"num_workers": 2, "strategy": "fsdp"})
    model = Tied()
    model.unused.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    task = Task(
        Workload(name="own"), config, model, torch.ones(2, 3, dtype=int), DistContext(0, 1, torch.device("cpu"))
    )
    assert policy_of(task) == MixedPrecisionPolicy()
    policy = policy_of(replace(task, config={**config, "precision": "bf16"}))
    types = {name: policy.param_dtype_override_fn(p) for name, p in model.named_parameters()}
    converted = {name for name, dtype in types.items() if dtype != torch.float32}
    assert converted == {"hidden.weight", "hidden.bias", "transposed"}
    assert {types[name] for name in converted} == {torch.bfloat16} and policy.reduce_dtype == torch.float32
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.training and model.norm.training and not model.unused.training


def test_pairs_of_linear_layers_with_elementwise_ones_between_are_split():
    model = nn.Sequential(
        *(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 4), nn.LayerNorm(4)),
        nn.Sequential(nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)),
    )
    assert plan_of(Workload(name="own"), model) == {"0": "column", "3": "row", "5.2": "column", "5.4": "row"}


def test_a_row_of_layers_is_what_the_workload_says_or_an_nn_sequential():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert layers_of(Workload(name="own"), model) == list(model)
    assert layers_of(Workload(name="own"), nn.Linear(2, 2)) is None
    layers = layers_of(Workload(name="own", layers=lambda m: [m.get_submodule("0"), nn.Flatten()]), model)
    assert layers is not None and names_of(model, layers) == ["0", ""]


def tied(_):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return nn.Sequential(first, second)


OWN = Workload(name="own", model=lambda _: nn.Linear(2, 2), data=lambda _: None)
TIED = replace(OWN, model=tied)
CASES = [
    (TIED, {"strategy": "pipeline"}, "can't cut between layers that share weights"),
    (OWN, {"strategy": "pipeline"}, "needs a model that can be split: Linear is not known to be a sequence of layers"),
    (digits, {"strategy": "pipeline", "num_workers": 8, "num_microbatches": 8}, "needs 8 stages, and the model has"),
    (digits, {"strategy": "pipeline", "pipeline_split": ("x",)}, "can't begin a stage at 'x'"),
    (wide_mlp, {"strategy": "pipeline", "pipeline_split": ("2", "4")}, "needs 1 name for 2 stages, not 2"),
    (resnet, {"strategy": "tensor"}, "needs layers that can be split"),
    (replace(wide_mlp, tensor_plan=lambda _: {"x": "row"}), {"strategy": "tensor"}, "can't split layer 'x' by 'row'"),
    (replace(wide_mlp, tensor_plan=lambda _: {"1": "row"}), {"strategy": "tensor"}, "can't split layer '1' by 'row'"),
    (replace(wide_mlp, tensor_plan=lambda _: {"0": "in"}), {"strategy": "tensor"}, "can't split layer '0' by 'in'"),
    (wide_mlp, {"strategy": "tensor", "width": 30, "num_workers": 4}, "can't split the 30 features of layer 0"),
]


@pytest.mark.parametrize(("workload", "chosen", "expected"), CASES)
def test_a_model_that_a_strategy_can_not_take_is_refused_with_a_fix(workload, chosen, expected):
    problem = check_compatible(workload, resolve(workload, {"num_workers": 2, **chosen}))
    assert expected in problem[0] and problem[1]


@pytest.mark.parametrize(
    ("workload", "strategy"),
    [(w, s) for w in (wide_mlp, transformer) for s in ("tensor", "pipeline", "hybrid", "fsdp", "ddp")]
    + [(resnet, "pipeline")],
)
def test_models_that_can_be_split_are_not_refused(workload, strategy):
    sizes = {"tensor_size": 2, "pipeline_size": 2} if strategy == "hybrid" else {}
    assert check_compatible(workload, resolve(workload, {"num_workers": 4, "strategy": strategy, **sizes})) is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_builds_its_class_and_is_described(strategy):
    traits = STRATEGIES[strategy]
    assert issubclass(traits.build, Strategy) and traits.splits and traits.built_on


GPU = torch.device("cuda", 0)
TWO = DistContext(0, 2, GPU)


@pytest.fixture
def sent_from(monkeypatch):
    """Return the devices of the tensors that are sent; none is received."""
    devices = []
    for name in ("broadcast", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda tensor, **_: devices.append(tensor.device))
    return devices


def num_on_gpu():
    """Return the elements of all tensors that a GPU would hold."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is FakeTensor]
    return sum(t.numel() for t in tensors if t.device == GPU)


HOLDERS = {"fsdp": SplitModel, "deepspeed": DeepSpeed, "local_sgd": LocalSgd}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_gpu_holds_a_second_model_only_while_it_is_evaluated(name, sent_from):
    config = resolve(Workload(name="own"), {"num_workers": 2, "strategy": name})
    with FakeTensorMode():  # tensors without memory stand for a GPU's
        with GPU:
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
            model.register_buffer("scale", torch.ones(8))
            x = torch.ones(2, 8)
        size = 2 * (64 + 8) + 8
        strategy = HOLDERS[name](Task(Workload(name="own"), config, model, x, TWO))
        full_model = broadcast_buffers(strategy.full_model(), GPU)
        assert num_on_gpu() == size + x.numel()
        assert {tensor.device.type for tensor in full_model.state_dict().values()} == {"cpu"}
        evaluated = on_device(full_model, GPU)
        assert on_device(evaluated, GPU) is evaluated and evaluated(x).device == GPU
        assert num_on_gpu() == 2 * size + x.numel()
        del evaluated
        assert num_on_gpu() == size + x.numel()
    assert set(sent_from) == {GPU}  # NCCL sends nothing else


def test_a_rank_without_gradients_takes_part_in_the_clipping_from_its_device(sent_from):
    config = resolve(Workload(name="own"), {})
    with FakeTensorMode():
        with GPU:
            model = nn.Linear(2, 2)
        strategy = SplitModel(Task(Workload(name="own"), config, model, torch.ones(2, 2), TWO))
        strategy._layer_group = object()
        strategy.clip(1.0)
    assert sent_from == [GPU]


def test_a_copy_keeps_shared_weights_shared_and_frozen_weights_frozen():
    model = tied({})
    model[0].bias.requires_grad_(False)
    copy = copied(model, torch.device("cpu"))
    assert copy[0].weight is copy[1].weight and not copy[0].bias.requires_grad and copy[1].bias.requires_grad
    for (name, theirs), ours in zip(copy.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs, ours) and theirs.data_ptr() != ours.data_ptr(), name
    assert on_device(model, torch.device("cpu")) is model
