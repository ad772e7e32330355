"""A gang: the workers of one TorchTrainer, which run one trial after another of the same placement.

The Train workers don't train themselves. Each takes one `TrialJob` after another from the broker, runs its rank in a
separate process (see `raypar.run.ranks`), and returns reports and the end. They don't import torch, so a gang starts in
about a second and costs little while parked.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from raypar.files import make_private_folder, pieces
from raypar.gpus import VISIBLE, VISIBLE_AMD
from raypar.measure.telemetry import this_machine
from raypar.run.agent import Agent, AgentCalls, Ended, Moved, Ready, Reported, Welcome, agent_at, serve_node
from raypar.run.locks import Holder, locked_cores
from raypar.run.nccl_ras import ASK_S, listening, note_status
from raypar.run.pool import Greeting, Turn, start_rank
from raypar.run.ranks import ForkClient, RankEnd, RankProcess, await_end, supervise
from raypar.study.trial import Placement
from raypar.trace import mark
from raypar.train.affinity import cores_near_gpu, own_cores
from raypar.train.job import RankContext, TrialJob
from raypar.train.position import Position

# Each would start an actor, which delays a gang's start by seconds and takes time from the trials by polling.
# The broker removes the placement group of a lost gang itself.
UNUSED_CALLBACKS = ("PlacementGroupCleanerCallback", "DatasetsCallback")


class _SharedGpus(Backend):  # type: ignore[misc]
    """Backend whose workers see all GPUs of their gang on the node, as with TorchConfig. LOCAL_RANK numbers them."""

    share_cuda_visible_devices = True


class GangBackend(BackendConfig):  # type: ignore[misc]
    """Backend that replaces TorchConfig. Workers have no process group, since every trial's ranks create one."""

    backend = "gloo"  # read by TorchTrainer only
    backend_cls = _SharedGpus


def gpus_of_gang(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that show a rank the GPUs that its gang has on this node.

    Args:
        environment: a gang worker's environment. With AMD GPUs, Ray leaves HIP's variable at the worker's own GPU.
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
    forks_ahead: bool,
    on_private_ray: bool,
) -> None:
    """Run a gang until it ends (blocking). Raises the error of `TorchTrainer.fit` if the gang is lost.

    Args:
        resources: resources that each worker reserves.
        strategy: Ray's placement group strategy.
        labels: labels that the node of each worker must have; empty: any node.
        fresh: ranks are new interpreters.
        forks_ahead: the process of the next trial is forked while a trial starts.
        on_private_ray: Ray has no autoscaler, and runs this study only.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    class GangTrainer(TorchTrainer):  # type: ignore[misc]
        def _initialize_and_run_controller(self, **arguments: Any) -> Any:
            if not on_private_ray:
                return super()._initialize_and_run_controller(**arguments)
            if "scaling_policy" in arguments:
                arguments["scaling_policy"] = fixed_policy(self.scaling_config)
            return run_controller(arguments)

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
            "forks_ahead": forks_ahead,
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


def run_controller(arguments: Mapping[str, Any]) -> Any:
    """Run Train's controller in this process, and return the run's result.

    By default, it is an actor, whose process delays a gang's start by seconds and takes time from the trials.
    """
    from ray.train.v2._internal.execution.controller import TrainController

    controller = TrainController(**arguments)
    asyncio.run(controller.run())
    return controller.get_result()


def fixed_policy(scaling: Any) -> Any:
    """Return Train's policy for a fixed number of workers, without the actor that asks an autoscaler for them.

    Args:
        scaling: the gang's ScalingConfig.
    """
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    class Policy(FixedScalingPolicy):  # type: ignore[misc]
        def after_controller_start(self, train_run_context: Any) -> None:
            pass

        def _maybe_send_resource_request(self) -> None:
            pass

    return Policy(scaling)


def loss_reason(error: BaseException | None, hostnames: Mapping[int, str]) -> str:
    """Return on which nodes a gang lost workers, and why, in one line.

    Args:
        error: error of `train_gang`; None: it returned.
        hostnames: host name of each rank's node, for workers that have started.
    """
    if error is None:
        return "its workers have left"
    ranks_by_reason: dict[str, list[int]] = {}
    for rank, failure in sorted(getattr(error, "worker_failures", {}).items()):
        # Train wraps both Ray's errors and those of the worker's code.
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
    """Return an error's name and text without the ids that Ray lists on indented lines."""
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
    return f"{type(error).__name__}: {' '.join(filter(None, lines))}"


def serve(config: Mapping[str, Any]) -> None:
    """Greet the broker, then run trials until it closes the gang. This is the gang's ``train_loop_per_worker``."""
    mark("gang: worker serves")
    broker, gang_id = config["broker"], config["gang_id"]
    worker, ip, on_gpu = ray.train.get_context(), ray.util.get_node_ip_address(), config["on_gpu"]
    context = RankContext(
        rank=worker.get_world_rank(),
        world_size=worker.get_world_size(),
        local_rank=worker.get_local_rank(),
        local_world_size=worker.get_local_world_size(),
        node_rank=worker.get_node_rank(),
        # Ray sets them for the worker, and the rank is not its child.
        environment=gpus_of_gang(os.environ) if on_gpu else {},
        node_ip=ip,
    )
    rank = context.rank
    greeting = Greeting(
        node_id=ray.get_runtime_context().get_node_id(),
        host=this_machine(),
        hostname=socket.gethostname(),
        context=context,
        cores=own_cores(),
        near=cores_near_gpu(context.local_rank, {**os.environ, **context.environment}) if on_gpu else frozenset(),
        placement_group=ray.util.get_current_placement_group(),
    )
    here = Agent(broker, gang_id, context.node_ranks) if context.local_rank == 0 else None
    address_of_agent = serve_node(here) if here and context.local_world_size > 1 else None
    welcome: Welcome = ray.get(broker.hello.remote(gang_id, greeting, address_of_agent))
    agent: AgentCalls | None = here or (agent_at(welcome.agent) if welcome.agent else None)
    assert agent is not None
    settings, workload = welcome.settings_and_workload()
    forks = None if config["fresh"] else ForkClient(welcome.fork_address, forks_ahead=config["forks_ahead"])
    if forks is not None and (notice := forks.wait_until_ready()):  # before the trial's time, which may be limited
        ray.get(broker.notify.remote(notice))
    ended: tuple[Ended, ...] = ()
    await_last = _nothing  # until the process of the last trial has ended
    for number in itertools.count(1):
        with socket.socket() as listen:
            address = None
            if rank == 0:
                # Bound before the port is announced, and passed to the rank open, so no other process can take it.
                one_node = context.local_world_size == context.world_size
                listen.bind(("127.0.0.1" if one_node else ip, 0))
                listen.listen(max(128, 2 * context.world_size))
                address = listen.getsockname()
            # One call for both, so that the next trial starts a few milliseconds earlier.
            agent.send(*ended, Ready(rank, address))
            await_last()
            turn = agent.next_turn(number - 1)
            if turn is None:
                return
            job = settings.job(turn.spec, turn.attempt, workload, turn.uid).on_this_node()
            end, await_last = _run_turn(broker, agent, number, turn, job, forks, context, listen)
        ended = (Ended(number, rank, end),)
        if forks is not None and forks.is_lost:
            agent.send(*ended)
            # Train ends the other workers with the first that fails, and theirs would be lost.
            ray.get(broker.wait_until_over.remote(gang_id, number))
            raise RuntimeError("the fork server of this node has ended; the next gang will have a new one")


def _nothing() -> object:
    return None


def _run_turn(
    broker: Any,
    agent: AgentCalls,
    number: int,
    turn: Turn,
    job: TrialJob,
    forks: ForkClient | None,
    context: RankContext,
    listen: socket.socket,
) -> tuple[RankEnd, Callable[[], object]]:
    """Run this worker's rank of a trial, unless another study holds its cores.

    Args:
        number: of the gang's trial, from 1.

    Returns:
        The rank's end, and a function that waits for the end of its process.
    """
    me = Holder.here(turn.spec.study, ())
    to_lock, device = turn.to_lock.get(context.rank, ()), turn.spec.placement.device
    with locked_cores(me, to_lock) as holder, listening(context, device, os.environ) as context:
        if holder:
            return RankEnd(cores_held_by=holder), _nothing
        make_private_folder(job.settings.log_dir)
        process, context = start_rank(job, turn, context, forks, listen)
        end = _supervised(process, agent, number, job, context)
        if context.rank == 0 and end.outcome is not None and job.sends_artifacts:
            _send_artifacts(broker, job)
        await_process = _nothing if end.outcome is None else partial(await_end, process, job.log_path(context.rank))
        if to_lock or forks is None:  # a fresh interpreter's processes may outlive this one, which may end at any time
            await_process()
            return end, _nothing
        return end, await_process


def _supervised(process: RankProcess, agent: AgentCalls, number: int, job: TrialJob, context: RankContext) -> RankEnd:
    rank, over = context.rank, threading.Event()

    def kill_on_request() -> None:
        order = agent.wait_for_kill(number)
        if order is not None and not over.is_set():
            if order.hangs and job.spec.placement.device == "cuda":
                # Its peers are asked as well, so they must live until then.
                note_status(context, os.environ, job.log_path(rank)) if rank == 0 else over.wait(ASK_S)
            process.kill()

    threading.Thread(target=kill_on_request, daemon=True).start()

    def on_report(index: int, metrics: Mapping[str, float], position: Position) -> bool:
        agent.send(Reported(number, rank, index, None if rank else metrics, position))
        return agent.verdict(number, index)

    def on_position(position: Position) -> None:
        agent.send(Moved(number, rank, position))

    end = supervise(process, job, context, on_report, on_position)
    over.set()
    return end


def _send_artifacts(broker: Any, job: TrialJob) -> None:
    """Move a trial's artifacts to the driver, piece by piece. They stay here if the driver can't store them."""
    if not job.artifact_dir.is_dir():
        return
    # The driver fetches the bytes from here. The broker passes references, in a list so that Ray doesn't resolve them.
    messages = chain(([ray.put(piece)] for piece in pieces(job.artifact_dir)), [[]])
    if all(ray.get(broker.send.remote(job.uid, job.attempt, message)) for message in messages):
        shutil.rmtree(job.artifact_dir, ignore_errors=True)
