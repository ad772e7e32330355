"""All-reduce: every rank gets the mean gradient, in buckets while the backward pass still runs, and steps by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raypar.errors import Mistake, WorkloadError
from raypar.parallel.base import DataParallelism
from raypar.study.strategy import Conflict, StrategyTraits
from raypar.study.workload import Config, Option, at_least, one_of, whole_number

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch._C._distributed_c10d import GradBucket

    from raypar.parallel.gradient_norms import Hook, NotedBuckets
    from raypar.parallel.strategy import Batch, ForwardBackward, Task

COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
BUCKET_MB = Option(
    None,
    float,
    "size of the buckets that gradients are sent in, MiB; 0: one gradient each; None: torch's 25 MiB",
    at_least(0),
    optional=True,
)
OPTIONS: Mapping[str, Option] = {
    "bucket_mb": BUCKET_MB,
    "overlap": Option(True, bool, "send gradients while the backward pass still runs; False: after it"),
    "compression": one_of("none", COMPRESSIONS, "lossy compression of the gradients that are sent"),
    "powersgd_rank": whole_number(
        1, "rank of PowerSGD's factors", has_effect=lambda config: config["compression"] == "powersgd"
    ),
    "find_unused_parameters": Option(
        None,
        bool,
        "let DDP search for parameters without a gradient in each step; None: if the model has any",
        optional=True,
    ),
    "static_graph": Option(False, bool, "let DDP rely on every step using the same weights"),
    "noise_scale": Option(False, bool, "measure the gradient noise scale: up to which batch a larger one pays"),
}


def conflicts(config: Config, swept: Collection[str]) -> Iterator[Conflict]:
    """Yield the conflicts of static graphs, PowerSGD and the noise scale."""
    if config["noise_scale"]:
        yield from _noise_conflicts(config, swept)
    if config["compression"] != "powersgd" and "powersgd_rank" in swept and "compression" not in swept:
        yield "powersgd_rank", "has no effect without PowerSGD", 'use compression="powersgd"'
    if config["num_workers"] == 1:
        return
    if config["static_graph"] and config["find_unused_parameters"]:
        yield "find_unused_parameters", "is what static_graph does in the first step", "leave one of them out"
    if config["static_graph"] and config["accumulation_steps"] > 1:
        yield "static_graph", "does not go with accumulation_steps over 1", "leave one of them out"
    if config["checkpoint_every_epochs"] and config["compression"] == "powersgd":
        problem = "does not go with PowerSGD, which keeps errors in its hook from step to step"
        yield "checkpoint_every_epochs", problem, "leave one of them out"


def _noise_conflicts(config: Config, swept: Collection[str]) -> Iterator[Conflict]:
    keys = ("num_workers", "accumulation_steps")
    if all(config[key] == 1 and key not in swept for key in keys):
        problem = "compares the gradients of parts of a batch, and one worker without accumulation has only one part"
        yield "noise_scale", problem, "use num_workers or accumulation_steps of at least 2"
    if config["compression"] == "powersgd" and config["num_workers"] > 1:
        yield "noise_scale", "does not go with PowerSGD, which changes the mean gradient", "leave one of them out"


_SPARSE = Mistake(
    "noise_scale",
    True,
    "needs the norms of all gradients, and the model has sparse ones",
    "leave it out, or use torch.nn.Embedding(…, sparse=False)",
)
_UNFINISHED = Mistake(
    "model(config)",
    None,
    "some parameters got no gradient in a step, so that DDP could not finish it",
    "set find_unused_parameters=True, which searches for them in each step, and leave out static_graph",
)
# A bucket of one byte holds a single gradient: each is sent by itself.
UNFUSED_MB = 1 / 2**20


class AllReduce(DataParallelism):
    """torch's DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704)."""

    def __init__(self, task: Task) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(task)
        config, context = task.config, task.context
        self._context, self._workload_name = context, task.workload.name
        bucket_mb, finds_unused = config["bucket_mb"], config["find_unused_parameters"]
        if finds_unused is None:
            # A static graph has found them after its first step.
            finds_unused = task.gradients.are_missing and not config["static_graph"]
        self._ddp = DistributedDataParallel(
            task.model,
            device_ids=[context.device.index] if context.device.type == "cuda" else None,
            bucket_cap_mb=max(bucket_mb, UNFUSED_MB) if bucket_mb is not None else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=finds_unused,
            static_graph=config["static_graph"],
        )
        self.module: nn.Module = self._ddp
        self._compression = _Compression(config)
        self._noted: NotedBuckets | None = None
        hook: Hook = self._compression if config["overlap"] else AfterBackward(self._compression, context.device)
        if config["noise_scale"]:
            from raypar.parallel.gradient_norms import GradientNorms, NotedBuckets

            if task.gradients.are_sparse:
                raise WorkloadError.of(task.workload.name, [_SPARSE])
            self.gradient_norms = GradientNorms(config["batch_size"], context.device)
            hook = self._noted = NotedBuckets(hook, self.gradient_norms)
        if self._noted or config["compression"] != "none" or not config["overlap"]:
            self._ddp.register_comm_hook(None, lambda _, bucket: hook(bucket))

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        loss = do.run_in_parts(self.module, batch, self._num_parts, self._ddp.no_sync)
        try:
            self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError:  # else this rank would wait in its next collective for others, which wait in this one
            raise WorkloadError.of(self._workload_name, [_UNFINISHED]) from None
        if self._noted is not None:
            self._noted.end_step(batch, do.scaled)
        return loss

    def full_model(self) -> nn.Module:
        from raypar.parallel.strategy import broadcast_buffers

        # Each forward pass begins with the first rank's buffers, and the last step has changed them since.
        return broadcast_buffers(super().full_model(), self._context.device)

    def reset_state(self) -> None:
        self._compression.reset_state()


class _Compression:
    """Communication hook that compresses the gradients of a bucket; "none": leaves them as they are."""

    def __init__(self, config: Config) -> None:
        self._name, self._rank = config["compression"], config["powersgd_rank"]
        self.reset_state()

    def reset_state(self) -> None:
        """Drop the errors and last factors that PowerSGD carries from step to step."""
        self._state: Any = None
        if self._name == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            # DDP settles its buckets in the first step, whose gradients have to be all-reduced uncompressed.
            self._state = powerSGD_hook.PowerSGDState(None, self._rank, start_powerSGD_iter=2)

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks = {
            "none": _mean,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "powersgd": powerSGD_hook.powerSGD_hook,
        }
        sent: torch.futures.Future[Tensor] = hooks[self._name](self._state, bucket)  # type: ignore[operator]
        if self._name == "powersgd":
            # It sends its factors from gloo's few threads, and waits there: with a second bucket on its way, the ranks
            # would send in different orders, or wait for each other forever.
            sent.wait()
        return sent


def _mean(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Send a bucket as DDP does without a hook, bit by bit: torch's own hook divides, which rounds differently."""
    import torch.distributed as dist

    sent = dist.all_reduce(bucket.buffer().mul_(1 / dist.get_world_size()), async_op=True)
    done: torch.futures.Future[Tensor] = sent.get_future().then(lambda future: future.value()[0])
    return done


class AfterBackward:
    """Communication hook that sends nothing before the last gradient is ready, then one bucket after another.

    The usual order, with the same buckets, is wait-free back-propagation (Zhang et al. 2017,
    https://arxiv.org/abs/1706.03292); the difference is what it saves.
    """

    def __init__(self, hook: Callable[[GradBucket], torch.futures.Future[Tensor]], device: torch.device) -> None:
        self._hook = hook
        self._devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        self._held: list[tuple[GradBucket, torch.futures.Future[Tensor]]] = []

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        import torch

        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=self._devices)
        self._held.append((bucket, done))
        if bucket.is_last():
            held, self._held = self._held, []
            for held_bucket, promised in held:
                promised.set_result(self._hook(held_bucket).wait())
        return done


STRATEGY = StrategyTraits(
    build=AllReduce,
    splits="the batch",
    built_on="torch's `DistributedDataParallel`",
    options=OPTIONS,
    layouts=lambda _: iter([{}]),
    conflicts=conflicts,
    scales_loss=True,
    takes_sparse_gradients=True,
)
