"""Hooks of the observer in a script's process, with stand-ins for torch's loaders, optimizers and models."""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raypar.observe import communication, events, loaders, modules, optimizers, start
from raypar.observe.events import EventKind, EventRecorder, read_events
from raypar.observe.loaders import NUM_DIGESTED_ITERATORS, NUM_DIGESTS, digest
from raypar.observe.ranks import read_ranks
from raypar.observe.steps import observed


@pytest.fixture
def recorder(tmp_path: Path) -> EventRecorder:
    made = EventRecorder(tmp_path)
    made.next_write_s = math.inf  # tests look at its rows
    return made


def of_kind(recorder: EventRecorder, kind: EventKind) -> list[events.Event]:
    return [row for row in recorder.rows if row[0] == kind]


# ---- loaders


class Loader:
    """Stand-in for a ``DataLoader``, whose length must not be asked for."""

    num_workers, pin_memory, drop_last, sampler = 0, False, False, None

    def __init__(self, batches: object, batch_size: int | None = None) -> None:
        self.dataset, self.batch_size = batches, batch_size

    def __iter__(self) -> Iterator[Any]:
        return self.iterator_type(iter(self.dataset))  # type: ignore[attr-defined, no-any-return]

    def __len__(self) -> int:
        raise AssertionError


class Batches:
    """Stand-in for a ``_BaseDataLoaderIter``."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        return next(self.batches)


@pytest.fixture
def loader(recorder: EventRecorder) -> Any:
    """Return the class of observed loaders."""
    iterator = type("Batches", (Batches,), {"__next__": Batches.__next__})
    cls = type("Loader", (Loader,), {"iterator_type": iterator, "__init__": Loader.__init__})
    loaders.HOOKS["torch.utils.data.dataloader"](
        SimpleNamespace(DataLoader=cls, _BaseDataLoaderIter=iterator), recorder
    )
    return cls


def detection(batch_size: int) -> tuple[tuple[torch.Tensor, ...], tuple[dict[str, torch.Tensor], ...]]:
    """Return images of different sizes and their boxes, as torchvision's references collate them."""
    return tuple(torch.zeros(3, 5 + i, 5) for i in range(batch_size)), ({"boxes": torch.zeros(2, 4)},) * batch_size


@pytest.mark.parametrize(
    ("batch", "batch_size", "expected"),
    [
        (torch.zeros(4, 3), None, (4, 0)),
        ((torch.zeros(8, 3), torch.zeros(8)), 8, (8, 0)),
        (detection(8), 8, (8, 0)),
        ([(torch.zeros(3), 1)] * 8, 8, (8, 0)),
        ([torch.zeros(3, 2)] * 8, 8, (8, 0)),
        (["text"] * 8, 8, (8, 0)),
        ((["text"] * 8, torch.zeros(8)), 8, (8, 0)),
        ({"labels": torch.zeros(8), "input_ids": torch.zeros(8, 16, dtype=torch.int64)}, 8, (8, 128)),
        (np.zeros((4, 5), np.int64), 4, (4, 20)),
        (torch.zeros(4, 784, dtype=torch.uint8), 4, (4, 0)),
        (torch.zeros(4, 5, dtype=torch.bool), 4, (4, 0)),
        (SimpleNamespace(num_graphs=7), 7, (7, 0)),
        (SimpleNamespace(), 7, (0, 0)),
        ([], 7, (0, 0)),
    ],
)
def test_samples_and_tokens_of_a_batch(
    recorder: EventRecorder, loader: Any, batch: object, batch_size: int | None, expected: tuple[int, int]
) -> None:
    for _ in loader([batch], batch_size):
        pass
    ((*_, samples, tokens),) = of_kind(recorder, EventKind.BATCH)
    assert (samples, tokens) == expected and not recorder.facts["problems"]


def test_the_last_batch_counts_as_the_first_one_does(recorder: EventRecorder, loader: Any) -> None:
    for _ in loader([detection(8), detection(2)], 8):
        pass
    assert [row[4] for row in of_kind(recorder, EventKind.BATCH)] == [8, 2]


class Unfriendly:
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_an_unknown_kind_of_batch_and_iterator_is_a_problem_and_not_the_script_s(
    recorder: EventRecorder, loader: Any
) -> None:
    batches = [Unfriendly()]
    assert list(iter(loader(batches))) == batches
    loader.iterator_type = staticmethod(lambda batches: (batch for batch in batches))  # has no attributes
    assert list(iter(loader(batches))) == batches
    assert [problem.partition(":")[0] for problem in recorder.facts["problems"]] == ["batch", "DataLoader"]


def test_a_loader_that_replaces_another_one_is_the_same_loader(recorder: EventRecorder, loader: Any) -> None:
    for _ in range(3):
        for _ in loader([torch.zeros(2)], 2):
            pass
        gc.collect()
    assert len(recorder.facts["loaders"]) == 1
    first, second = loader([torch.zeros(2)], 2), loader([torch.zeros(2)], 2)
    assert [*zip(first, second, strict=True)] and len(recorder.facts["loaders"]) == 3


def test_only_some_iterators_have_digests(recorder: EventRecorder, loader: Any) -> None:
    each = loader([torch.ones(2) * i for i in range(9)])
    for _ in range(2 * NUM_DIGESTED_ITERATORS):
        assert len(list(iter(each))) == 9
    digests = recorder.facts["digests"].values()
    assert [len(of_iterator) for of_iterator in digests] == [NUM_DIGESTS] * NUM_DIGESTED_ITERATORS


def test_a_thread_that_loads_ahead_lets_nobody_wait(recorder: EventRecorder, loader: Any) -> None:
    recorder.thread = threading.get_ident()
    thread = threading.Thread(target=lambda: list(iter(loader([torch.zeros(2)]))))
    thread.start()
    thread.join()
    assert all(row[1] == row[2] for row in recorder.rows if row[0] in (EventKind.BATCH, EventKind.END))


def text(*words: int) -> torch.Tensor:
    """Return a batch of texts with these words, padded to 512."""
    return torch.cat([torch.tensor([101, *words]).repeat(4, 1), torch.zeros(4, 511 - len(words))], dim=1).long()


def image(value: float) -> torch.Tensor:
    """Return a batch of images with a dark border."""
    batch = torch.zeros(4, 1, 28, 28)
    batch[:, :, 8:20, 8:20] = value
    return batch


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (text(5, 6), text(5, 7)),
        (
            {"attention_mask": torch.ones(4, 8), "input_ids": text(5)},
            {"attention_mask": torch.ones(4, 8), "x": text(6)},
        ),
        (image(0.5), image(0.6)),
        (image(0.5).numpy(), image(0.6).numpy()),
        (["a", "b"], ["a", "c"]),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 2.0])),
    ],
)
def test_digests_tell_batches_apart(first: Any, second: Any) -> None:
    assert digest(first) is not None and digest(first) != digest(second)
    assert digest(first) == digest(copy.deepcopy(first))


@pytest.mark.parametrize("batch", [torch.eye(4).to_sparse(), torch.zeros(4, 3, device="meta"), SimpleNamespace()])
def test_batches_without_a_digest_are_not_taken_for_equal(recorder: EventRecorder, loader: Any, batch: object) -> None:
    for _ in loader([batch] * 5):
        pass
    assert [*recorder.facts["digests"].values()] == [[]] and not recorder.facts["problems"]


# ---- optimizers, backward passes and losses


class Script:
    """Stand-ins for torch's modules, with hooks."""

    def __init__(self, recorder: EventRecorder) -> None:
        self.recorder = recorder
        kind = type("Optimizer", (), {"profile_hook_step": staticmethod(lambda step: step)})
        optimizers.HOOKS["torch.optim.optimizer"](SimpleNamespace(Optimizer=kind), recorder)
        self.step = kind.profile_hook_step(lambda _, *args, **kwargs: (args, kwargs))
        self.autograd = SimpleNamespace(backward=lambda *_, **__: None)
        self.scaler = type("GradScaler", (), {"scale": lambda _, loss: loss * 65536, "step": Script.step_of_scaler})

    @staticmethod
    def step_of_scaler(_: object, optimizer: Any, step: Callable[[Any], None] | None = None) -> None:
        if step is not None:  # else gradients overflowed
            step(optimizer)

    def hook_backward(self) -> None:
        optimizers.HOOKS["torch.autograd"](self.autograd, self.recorder)
        optimizers.HOOKS["torch.amp.grad_scaler"](SimpleNamespace(GradScaler=self.scaler), self.recorder)


@pytest.fixture
def script(recorder: EventRecorder, monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.setattr(optimizers, "_optimizers", optimizers._Optimizers())
    monkeypatch.setattr(optimizers, "_losses", optimizers._Losses())
    monkeypatch.setattr(optimizers, "_device_values", optimizers._DeviceValues())
    return Script(recorder)


def sgd(lr: Any = 0.1, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(4, **kwargs))], lr=lr)


def test_only_closures_are_timed(script: Script) -> None:
    model = torch.nn.Linear(1, 1)
    assert script.step(sgd(), 0.5, model) == ((0.5, model), {})
    assert script.step(sgd(), model) == ((model,), {})
    ((closure, other), _) = script.step(sgd(), lambda: 3.0, 0.5)
    ((), named) = script.step(sgd(), closure=lambda: 4.0)
    assert (closure(), other, named["closure"]()) == (3.0, 0.5, 4.0)
    assert len(of_kind(script.recorder, EventKind.CLOSURE)) == 2


def test_learning_rates_and_parameters_of_any_type_can_be_written(script: Script, tmp_path: Path) -> None:
    script.step(sgd(torch.tensor(0.5)))
    script.step(sgd(dtype=torch.complex64))
    script.recorder.close()
    (path,) = tmp_path.glob("*.events")
    rows, facts = read_events(path)
    assert [each["lr"] for each in facts["optimizers"]] == [[0.5], [0.1]]
    assert [math.isnan(row[4]) for row in rows if row[0] == EventKind.PARAMETERS] == [False, True]


def test_the_first_steps_of_many_optimizers_cost_little(script: Script) -> None:
    looks: list[int] = []
    script.recorder.at_optimizer.append(lambda: looks.append(script.recorder.num_steps))
    for _ in range(200):
        script.step(sgd())
    assert looks == [1, 2, 4, 8, 16, 32, 64, 128] and len(script.recorder.facts["optimizers"]) == 100


def test_an_error_after_a_step_is_a_problem_and_not_the_script_s(script: Script) -> None:
    def fail(text: str) -> None:
        raise RuntimeError(text)

    script.recorder.at_step.append(lambda: fail("x"))
    script.recorder.at_optimizer.append(lambda: fail("y"))
    script.step(sgd())
    assert len(script.recorder.facts["problems"]) == 2


def test_backward_passes_of_checkpoints_are_part_of_the_step_s(script: Script) -> None:
    def backward(loss: torch.Tensor, *, depth: int = 0) -> None:
        if depth < 2:
            script.autograd.backward((torch.ones(2),), depth=depth + 1)

    script.autograd.backward = backward
    script.hook_backward()
    script.autograd.backward(torch.tensor(3.0))
    script.autograd.backward([torch.tensor(4.0)])
    assert [row[4] for row in of_kind(script.recorder, EventKind.BACKWARD)] == [3.0, 4.0]


def test_a_backward_pass_that_fails_is_the_script_s_error_and_the_next_one_is_recorded(script: Script) -> None:
    errors = [ValueError("x")]

    def backward(_: torch.Tensor) -> None:
        if errors:
            raise errors.pop()

    script.autograd.backward = backward
    script.hook_backward()
    with pytest.raises(ValueError, match="x"):
        script.autograd.backward(torch.tensor(3.0))
    script.autograd.backward(torch.tensor(3.0))
    assert len(of_kind(script.recorder, EventKind.BACKWARD)) == 1


def test_losses_are_the_ones_before_scaling_or_unknown(script: Script) -> None:
    script.hook_backward()
    scaler = script.scaler()
    first, second = scaler.scale(torch.tensor(1.0)), scaler.scale(torch.tensor(2.0))
    script.autograd.backward(first)
    script.autograd.backward(second)
    script.autograd.backward(scaler.scale(torch.tensor(1.0)) + scaler.scale(torch.tensor(2.0)))
    script.autograd.backward(torch.tensor(3.0))
    losses = [row[4] for row in of_kind(script.recorder, EventKind.BACKWARD)]
    assert losses[:2] == [1.0, 2.0] and math.isnan(losses[2]) and losses[3] == 3.0


def test_a_skipped_step_is_that_of_its_optimizer(script: Script) -> None:
    script.hook_backward()
    scaler, first, second = script.scaler(), sgd(), sgd()
    counts: list[bool] = []
    for optimizer, step in ((first, script.step), (second, None), (first, None), (second, script.step)):
        scaler.step(optimizer, step)
    scaler.step(SimpleNamespace(), lambda _: counts.append(script.recorder.counts_reads))  # no step that is known
    assert [(row[3], row[4]) for row in of_kind(script.recorder, EventKind.STEP)] == [(0, 1), (1, 0), (0, 0), (1, 1)]
    assert script.recorder.num_steps == 2 and counts == [False] and script.recorder.counts_reads


def test_values_of_a_device_are_recorded_once_they_are_copied(script: Script) -> None:
    values, loss = optimizers._device_values, torch.tensor(2.0)
    values.add(EventKind.LOSS, 1.0, 0.0, loss)
    loss += 1  # the script uses the memory again
    values.write(script.recorder)
    assert not script.recorder.rows
    values.write(script.recorder)
    assert script.recorder.rows == [(EventKind.LOSS, 1.0, 1.0, 0.0, 2.0, 0.0)]
    values.add(EventKind.PARAMETERS, 2.0, 1.0, loss)
    values.finish(script.recorder)
    assert script.recorder.rows[1:] == [(EventKind.PARAMETERS, 2.0, 2.0, 1.0, 3.0, 0.0)]


# ---- models


def test_the_data_of_a_model_that_is_freed_are_kept(recorder: EventRecorder) -> None:
    class Logger:
        iteration = 0

        def _get_ddp_logging_data(self) -> SimpleNamespace:
            ints = {"iteration": self.iteration, "avg_backward_comm_time": 100 + self.iteration, "rank": 3}
            return SimpleNamespace(strs_map={}, ints_map=ints)

    class Model:
        device_type = "cpu"

        def __init__(self) -> None:
            self.logger = Logger()

        def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
            assert rate == 1

    communication.HOOKS["torch.nn.parallel.distributed"](SimpleNamespace(DistributedDataParallel=Model), recorder)
    model = Model()
    for iteration in range(21):
        model.logger.iteration = iteration
        recorder.call(recorder.at_step)
    del model
    gc.collect()
    recorder.call(recorder.at_facts)
    before = {"iteration": 10, "avg_backward_comm_time": 110}
    assert recorder.facts["ddp"] == [{"iteration": 20, "avg_backward_comm_time": 120, "before": before}]
    assert not recorder.facts["problems"]


# ---- recording


def test_steps_after_a_long_recording_are_counted_by_optimizer(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_ROWS", 12)
    monkeypatch.setattr(events, "WRITE_EVERY_S", 0.0)
    script.recorder.next_write_s = 0.0
    first, second = sgd(), sgd()
    for _ in range(50):
        script.step(first)
        script.step(second)
    script.recorder.close()
    (path,) = tmp_path.glob("*.events")
    seen = observed(*read_events(path))
    assert seen is not None and len(seen.steps) + 1 + seen.num_unrecorded == 50 and seen.num_unrecorded


def test_facts_of_the_end_are_written_although_nothing_happened_since(script: Script, tmp_path: Path) -> None:
    script.step(sgd())
    script.recorder.write()
    script.recorder.at_close.append(lambda: script.recorder.facts.update(last=True))
    script.recorder.close()
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["last"]


def test_facts_are_written_as_soon_as_events_refer_to_them(script: Script, tmp_path: Path) -> None:
    script.step(sgd())
    script.recorder.write()
    script.recorder.facts["num_threads"] = 3
    script.step(sgd())
    script.recorder.write()
    (path,) = tmp_path.glob("*.json")
    facts = json.loads(path.read_text())
    assert len(facts["optimizers"]) == 2 and facts["num_threads"] == 3
    script.recorder.facts["num_threads"] = 4
    script.step(sgd())
    script.recorder.facts["optimizers"].pop()
    script.recorder.write()
    assert json.loads(path.read_text())["num_threads"] == 3, "a new file for each write takes too long"
    script.recorder.close()
    assert json.loads(path.read_text())["num_threads"] == 4


def test_a_forked_process_writes_facts_with_its_first_events(script: Script, tmp_path: Path) -> None:
    script.step(sgd())
    script.recorder.write()
    script.recorder.facts["optimizers"].clear()  # the child has no entries of its own
    script.recorder._forget()
    (path,) = tmp_path.glob("*.json")
    path.unlink()
    script.step(sgd())
    script.recorder.facts["optimizers"].clear()
    script.recorder.write()
    assert json.loads(path.read_text())["pid"]


def test_an_observer_that_can_not_write_says_so(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.recorder.mark(events.HAS_TORCH)
    optimizer = sgd()
    for _ in range(3):
        script.step(optimizer)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(events.json, "dumps", fail)
        script.recorder.write()
    script.recorder.close()
    assert "no longer observed: OSError: disk full" in capsys.readouterr().err
    assert read_ranks(tmp_path) == ((), "the observer stopped: OSError: disk full")


# ---- start


def test_a_module_that_a_library_only_looks_for_gets_its_hooks_when_it_is_imported(
    recorder: EventRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looked_for.py").write_text("names = ['own']")
    monkeypatch.syspath_prepend(tmp_path)
    finder = start._AfterImport({"looked_for": [lambda module, _: module.names.append("hook")]}, recorder)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.util.find_spec("looked_for") is not None
    assert importlib.import_module("looked_for").names == ["own", "hook"]


def test_torch_compile_leaves_the_observer_alone(recorder: EventRecorder) -> None:
    rules = SimpleNamespace(FORCE_SKIP_FILES=set())
    modules.HOOKS["torch._dynamo.trace_rules"](rules, recorder)
    hooks = (optimizers._hook_backward, loaders._hook_loader, communication._hook_ddp)
    assert {hook.__code__.co_filename for hook in hooks} < rules.FORCE_SKIP_FILES
    assert modules.__file__ not in rules.FORCE_SKIP_FILES, "compiled models contain its function"


# Prints whether modules that imported a name from torch have what the observer replaced it with.
NOTED = """
import sys, types
import torch.distributed
def module(name):
    sys.modules[name] = made = types.ModuleType(name)
    exec("from torch.distributed import all_reduce as reduced, get_rank", vars(made))
    return made
early = module("early")
plain = [torch.distributed.all_reduce]  # not as a name, which would be replaced
if {is_noted}:
    from raypar.observe.start import note_names
    note_names()
late = module("late")
from raypar.observe.start import start
kind = type(torch)
start({folder!r}, {{}}).close()
hooked = torch.distributed.distributed_c10d.all_reduce
print(hooked is not plain[0], early.reduced is hooked, late.reduced is hooked, early.get_rank is late.get_rank)
print(torch.distributed.all_reduce is hooked, type(torch) is kind)
"""


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_name_imported_from_a_hooked_module_is_replaced_everywhere(is_noted, tmp_path):
    code = NOTED.format(is_noted=is_noted, folder=str(tmp_path))
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True"] * 6
