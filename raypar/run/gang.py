"""A gang: the workers of one TorchTrainer, which serve trial after trial of one placement.

The Train workers themselves never train. Each takes one `TrialJob` after the other from the broker, has its rank run in
a process of its own (see `raypar.run.ranks`), and passes reports and the end back. They import no torch, so that a gang
starts in about a second and can stay parked at little cost.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from raypar.files import make_private_folder, pieces
from raypar.gpus import VISIBLE, VISIBLE_AMD
from raypar.run.locks import Holder, locked_cores
from raypar.run.pool import Greeting, Turn, start_rank
from raypar.run.ranks import ForkClient, RankEnd, supervise
from raypar.study.trial import Placement
from raypar.trace import mark
from raypar.train.affinity import cores_near_gpu, host_cores
from raypar.train.job import RankContext, TrialJob
from raypar.train.position import Position

# Each would start an actor of its own, which takes seconds from a gang's start and, by polling, time from the trials.
# The broker itself removes the placement group of a gang that was lost.
UNUSED_CALLBACKS = ("PlacementGroupCleanerCallback", "DatasetsCallback")


class _SharedGpus(Backend):  # type: ignore[misc]
    """Backend whose workers on a node see each other's GPUs, as TorchConfig's do: LOCAL_RANK is the number of one."""

    share_cuda_visible_devices = True


class GangBackend(BackendConfig):  # type: ignore[misc]
    """Backend in place of TorchConfig: no process group in the workers, as every trial's ranks make their own."""

    backend = "gloo"  # TorchTrainer looks at it, nothing else does
    backend_cls = _SharedGpus


def gpus_of_gang(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that show a rank its gang's GPUs on this node.

    Args:
        environment: of a gang's worker. On a node with AMD's GPUs, Ray has left HIP's variable at the worker's own.
    """
    shared = environment.get(VISIBLE) or environment.get(VISIBLE_AMD, "")
    return {name: shared for name in (VISIBLE, VISIBLE_AMD) if name == VISIBLE or name in environment}


def train_gang(
    broker: Any,
    gang_id: str,
    placement: Placement,
    resources: Mapping[str, float],
    strategy: str,
    labels: Sequence[Mapping[str, str]],
    storage: str,
    *,
    fresh: bool,
) -> None:
    """Run a gang to its end; blocks. Raises what `TorchTrainer.fit` raises when the gang is lost.

    Args:
        resources: that each worker reserves.
        strategy: Ray's, of the placement group.
        labels: that the node of each worker has to have; empty: any.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    class GangTrainer(TorchTrainer):  # type: ignore[misc]
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()
            return [callback for callback in callbacks if type(callback).__name__ not in UNUSED_CALLBACKS]

    mark("gang: fit")
    GangTrainer(
        serve,
        train_loop_config={
            "broker": broker,
            "gang_id": gang_id,
            "fresh": fresh,
            "on_gpu": placement.device == "cuda",
        },
        torch_config=GangBackend(),
        scaling_config=ScalingConfig(
            num_workers=placement.num_workers,
            use_gpu=placement.device == "cuda",
            resources_per_worker=dict(resources),
            placement_strategy=strategy,
            label_selector=[dict(each) for each in labels] or None,
        ),
        run_config=RunConfig(
            name=f"gang-{gang_id}",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
        ),
    ).fit()


def loss_reason(error: BaseException | None, hostnames: Mapping[int, str]) -> str:
    """Return in one line on which nodes a gang has lost workers, and why.

    Args:
        error: raised by `train_gang`; None: it has returned.
        hostnames: of each rank's node, as far as the workers have come up.
    """
    if error is None:
        return "its workers have left"
    ranks_by_reason: dict[str, list[int]] = {}
    for rank, failure in sorted(getattr(error, "worker_failures", {}).items()):
        # Train wraps what Ray raised, and what the worker's own code did.
        cause = getattr(failure, "health_check_failure", None) or getattr(failure, "_base_exc", None) or failure
        ranks_by_reason.setdefault(_in_one_line(cause), []).append(rank)
    if not ranks_by_reason:
        return _in_one_line(error)
    parts = []
    for reason, ranks in ranks_by_reason.items():
        nodes = dict.fromkeys(hostnames[rank] for rank in ranks if rank in hostnames)
        parts.append(f"{', '.join(nodes) or 'a node'}: {reason}")
    return "; ".join(parts)


def _in_one_line(error: BaseException) -> str:
    """Return an error's name and text, without the ids that Ray lists on indented lines."""
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
    return f"{type(error).__name__}: {' '.join(filter(None, lines))}"


def serve(config: Mapping[str, Any]) -> None:
    """The ``train_loop_per_worker`` of a gang: greet the broker, then run its trials until it closes the gang."""
    mark("gang: worker serves")
    broker, gang_id = config["broker"], config["gang_id"]
    worker, ip, on_gpu = ray.train.get_context(), ray.util.get_node_ip_address(), config["on_gpu"]
    context = RankContext(
        rank=worker.get_world_rank(),
        world_size=worker.get_world_size(),
        local_rank=worker.get_local_rank(),
        local_world_size=worker.get_local_world_size(),
        node_rank=worker.get_node_rank(),
        # Ray sets them for the worker; the rank is no child of it.
        environment=gpus_of_gang(os.environ) if on_gpu else {},
        node_ip=ip,
    )
    rank = context.rank
    greeting = Greeting(
        node_id=ray.get_runtime_context().get_node_id(),
        host=host_id(),
        hostname=socket.gethostname(),
        context=context,
        cores=host_cores(),
        near=cores_near_gpu(context.local_rank, {**os.environ, **context.environment}) if on_gpu else frozenset(),
        placement_group=ray.util.get_current_placement_group(),
    )
    fork_address: str = ray.get(broker.hello.remote(gang_id, greeting))
    forks = None if config["fresh"] else ForkClient(fork_address)
    if forks is not None and (notice := forks.wait_until_ready()):  # not in a trial's time, which may be limited
        ray.get(broker.notify.remote(notice))
    num_turns = 0
    while True:
        with socket.socket() as listen:
            address = None
            if rank == 0:
                # Bound before anybody learns the port, and handed to the rank as it is: nobody can take it meanwhile.
                one_node = context.local_world_size == context.world_size
                listen.bind(("127.0.0.1" if one_node else ip, 0))
                listen.listen()
                address = listen.getsockname()
            turn: Turn | None = ray.get(broker.next_turn.remote(gang_id, rank, num_turns, address))
            if turn is None:
                return
            end = _run_turn(broker, turn, forks, context, listen)
            ray.get(broker.finish.remote(turn.job.uid, turn.job.attempt, rank, end))
        num_turns += 1
        if forks is not None and forks.is_lost:
            raise RuntimeError("the fork server of this node has ended; the next gang will have a new one")


def _run_turn(
    broker: Any, turn: Turn, forks: ForkClient | None, context: RankContext, listen: socket.socket
) -> RankEnd:
    """Run this worker's rank of a trial, unless another study has its cores."""
    me = Holder.here(turn.job.spec.study, ())
    with locked_cores(me, turn.to_lock.get(context.rank, ())) as holder:
        return RankEnd(cores_held_by=holder) if holder else _run_rank(broker, turn, forks, context, listen)


def _run_rank(
    broker: Any, turn: Turn, forks: ForkClient | None, context: RankContext, listen: socket.socket
) -> RankEnd:
    job, rank = turn.job.on_this_node(), context.rank
    make_private_folder(job.settings.log_dir)
    process, context = start_rank(job, turn, context, forks, listen)
    over = threading.Event()

    def kill_on_request() -> None:
        if ray.get(broker.wait_for_kill.remote(job.uid, job.attempt)) and not over.is_set():
            process.kill()

    threading.Thread(target=kill_on_request, daemon=True).start()

    def on_report(index: int, metrics: Mapping[str, float], position: Position) -> bool:
        of_first = metrics if rank == 0 else None
        return bool(ray.get(broker.report.remote(job.uid, job.attempt, rank, index, of_first, position)))

    def on_position(position: Position) -> None:
        broker.note_position.remote(job.uid, job.attempt, rank, position)

    end = supervise(process, job, context, on_report, on_position)
    over.set()
    if rank == 0 and end.outcome is not None and job.sends_artifacts:
        _send_artifacts(broker, job)
    return end


def _send_artifacts(broker: Any, job: TrialJob) -> None:
    """Move a trial's artifacts to the driver, piece by piece; they stay here where it can't store them."""
    if not job.artifact_dir.is_dir():
        return
    # The bytes go straight to the driver: the broker passes on references, in a list, or Ray would resolve them.
    messages = chain(([ray.put(piece)] for piece in pieces(job.artifact_dir)), [[]])
    if all(ray.get(broker.send.remote(job.uid, job.attempt, message)) for message in messages):
        shutil.rmtree(job.artifact_dir, ignore_errors=True)


def host_id() -> str:
    """Return an id that is the same for all Ray nodes of one machine, and differs between machines."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"
