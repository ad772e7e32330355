"""Hooks for communication: waits for collectives, and the data that DDP logs itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any
from weakref import finalize

from .events import EventKind, EventRecorder, clock

# Functions of `torch.distributed` whose time is communication. If one is asynchronous, the wait for it is as well.
_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
)
_POINT_TO_POINT = ("batch_isend_irecv", "irecv", "isend", "recv", "send")

NUM_SETTLING_ITERATIONS = 10  # of DDP, whose average times the later ones exclude
BEFORE = "before"  # fact of a DDP model: its data after these iterations
# Of DDP's logging data: settings, the number of iterations that synchronise gradients, and averages in nanoseconds.
_DDP_FACTS = (
    "bucket_cap_bytes",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "unused_parameter_size",
    "iteration",
    "avg_backward_comm_time",
    "avg_backward_compute_comm_overlap_time",
    "total_parameter_size_bytes",
)


def _hook_collectives(module: Any, recorder: EventRecorder) -> None:
    from torch._C._distributed_c10d import Work

    append = recorder.append

    def timed(original: Callable[..., Any], *, sends: bool = False) -> Callable[..., Any]:
        @wraps(original)
        def communicate(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            recorder.at_moment(start)
            result = original(*args, **kwargs)
            end = clock()
            recorder.at_moment(end)
            append((EventKind.WAIT, start, end, 0.0, 0.0, 0.0))
            if sends:
                recorder.facts["sends"] = True
            return result

        return communicate

    Work.wait = timed(Work.wait)  # type: ignore[method-assign]
    for name in (*_COLLECTIVES, *_POINT_TO_POINT):
        if original := getattr(module, name, None):
            setattr(module, name, timed(original, sends=name in _POINT_TO_POINT))

    def note_ranks() -> None:
        if module.is_initialized():
            recorder.facts.update(rank=module.get_rank(), world_size=module.get_world_size())
            recorder.facts["backend"] = str(module.get_backend())

    recorder.at_facts.append(note_ranks)


def _hook_ddp(module: Any, recorder: EventRecorder) -> None:
    ddp, facts = module.DistributedDataParallel, recorder.facts.setdefault("ddp", [])
    create = ddp.__init__
    loggers: dict[int, Any] = {}  # by model, until it is freed
    settling: set[int] = set()  # models on CPUs in their first iterations

    def read(number: int) -> None:
        logged = loggers[number]._get_ddp_logging_data()
        data = {**logged.strs_map, **logged.ints_map}
        facts[number] |= {key: data[key] for key in _DDP_FACTS if key in data}

    def freed(number: int) -> None:
        read(number)
        del loggers[number]
        settling.discard(number)

    @wraps(create)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        try:
            number = len(facts)
            facts.append({})
            loggers[number] = self.logger
            finalize(self, recorder.call, [partial(freed, number)])
            if self.device_type == "cpu":  # its timers cost nothing there
                self._set_ddp_runtime_logging_sample_rate(1)
                if read_settled not in recorder.at_step:
                    recorder.at_step.append(read_settled)
                settling.add(number)
        except Exception as error:
            recorder.problem("DistributedDataParallel", error)

    def read_all() -> None:
        for number in loggers:
            read(number)

    def read_settled() -> None:
        for number in [*settling]:
            read(number)
            if facts[number].get("iteration", 0) >= NUM_SETTLING_ITERATIONS:
                settling.discard(number)
                facts[number][BEFORE] = dict(facts[number])
        if not settling:
            recorder.at_step.remove(read_settled)

    ddp.__init__ = __init__
    recorder.at_facts.append(read_all)


HOOKS: Mapping[str, Callable[[Any, EventRecorder], None]] = {
    "torch.distributed.distributed_c10d": _hook_collectives,
    "torch.nn.parallel.distributed": _hook_ddp,
}
