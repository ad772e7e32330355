"""Ranks without a runner: more of them than there are cores, where only numbers matter.

They are forked by a server that has imported all and has no threads: a fork of the test's own process, with those of
Ray and of torch in it, may wait for ever for a lock that one of them held.
"""

from __future__ import annotations

import contextlib
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from raypar.parallel.strategy import DistContext
from raypar.study.options import resolve
from raypar.study.workload import Workload
from raypar.train.loop import train

TIMEOUT = timedelta(seconds=240)  # for the slowest of machines: nothing waits so long


class Reports(list[dict[str, float]]):
    """A channel that keeps what is reported."""

    def report(self, metrics: Mapping[str, float]) -> bool:
        self.append(dict(metrics))
        return True


def trained(workload: Workload, config: Mapping[str, Any], num_ranks: int = 1, seed: int = 0) -> list[Reports]:
    """Return every rank's reports of a training."""
    return on_ranks(lambda context: reports_of(workload, config, context, seed), num_ranks)


def reports_of(workload: Workload, config: Mapping[str, Any], context: DistContext, seed: int = 0) -> Reports:
    """Return this rank's reports of a training."""
    reports = Reports()
    complete = resolve(workload, {**config, "num_workers": context.world_size})
    train(workload, complete, seed, context, reports, start_s=0.0)
    return reports


def on_ranks(do: Callable[[DistContext], Any], num_ranks: int) -> list[Any]:
    """Return what each of `num_ranks` ranks returns; raise what one of them raised. `do` may be a closure."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "raypar.train.loop"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pickled = cloudpickle.dumps(do)
    lines = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(target=_rank, args=(pickled, DistContext(r, num_ranks, torch.device("cpu")), port, lines[r][1]))
        for r in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        for _, end in lines:
            end.close()
        answers = [_answer(line) for line, _ in lines]
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failures := [text for kind, text in answers if kind == "error"]:
        raise AssertionError("\n".join(failures))
    return [value for _, value in answers]


def _answer(line: Connection) -> tuple[str, Any]:
    if not line.poll(TIMEOUT.total_seconds()):
        return "error", "a rank says nothing"
    try:
        kind, value = line.recv()
    except EOFError:
        return "error", "a rank ended without a word"
    return kind, value


def _rank(do: bytes, context: DistContext, port: int, line: Connection) -> None:
    torch.set_num_threads(1)
    try:
        with _group(context, port):
            line.send(("done", cloudpickle.loads(do)(context)))
    except BaseException:
        line.send(("error", f"rank {context.rank}: {traceback.format_exc()}"))


@contextlib.contextmanager
def _group(context: DistContext, port: int) -> Iterator[None]:
    if context.world_size == 1:
        yield
        return
    store = dist.TCPStore("127.0.0.1", port, context.world_size, is_master=context.rank == 0, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size, timeout=TIMEOUT)
    yield
    dist.barrier()
    dist.destroy_process_group()
