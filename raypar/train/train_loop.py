"""Existing ``train_loop_per_worker(config)`` of Ray Train, run unchanged in a rank.

Ray Train's local mode, meant for torchrun, makes ``ray.train.report``, ``get_context`` and
``ray.train.torch.prepare_*`` work outside of a Ray worker. Reports go to raypar.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils

from raypar.hooks import numbers_of, receive_with
from raypar.measure.laps import LapTimer
from raypar.measure.memory import MemoryMonitor
from raypar.measure.telemetry import Telemetry
from raypar.observe.ranks import read_ranks
from raypar.observe.start import start as observe
from raypar.scratch import scratch_folder
from raypar.study.conditions import RankConditions
from raypar.study.script_settings import SCRIPT_SETTINGS, script_settings
from raypar.study.trial import SINCE_LAUNCH
from raypar.train.job import Channel, RankContext, RankOutcome, StopTrial, TrialJob
from raypar.train.logged_run import LoggedRun, private_store
from raypar.train.script_times import check_applied, with_times

# raypar's own entries of a config, which the loop does not get.
OWN_KEYS = ("device", "cpus_per_worker", "num_threads", "stop_on_nan")


class ReportingUtils(LocalTrainFnUtils):  # type: ignore[misc]
    """Ray Train's local-mode session that sends reports to raypar."""

    def __init__(self, context: RankContext, channel: Channel) -> None:
        same = {name: getattr(context, name) for name in ("world_size", "local_rank", "local_world_size", "node_rank")}
        super().__init__(experiment_name="raypar", world_rank=context.rank, **same)
        self._channel, self._launched_at_s = channel, context.requested_at_s
        self._count = 0
        self._reported: set[str] = set()
        self.laps = LapTimer()

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, *args: Any, **kwargs: Any) -> None:
        reported_at_s = time.monotonic()
        super().report(metrics, checkpoint, *args, **kwargs)
        self._count += 1
        numbers = numbers_of(metrics)
        self._reported |= numbers.keys()
        launch = {SINCE_LAUNCH: reported_at_s - self._launched_at_s}
        continues = self._channel.report({"epoch": self._count, **numbers, **launch})
        self.laps.report(numbers, reported_at_s, time.monotonic())
        if not continues:
            raise StopTrial

    def report_logged(self, logged: LoggedRun, metric: str) -> bool:
        """Report the values of a metric that the loop logged to MLflow, unless it has reported the metric.

        Returns:
            Whether the runner has stopped the trial. The other ranks don't take part.
        """
        launched_at = time.time() - (time.monotonic() - self._launched_at_s)
        reports = [] if metric in self._reported else logged.reports(metric, launched_at)
        return not all(self._channel.report({"epoch": self._count + i, **each}) for i, each in enumerate(reports, 1))

    def step(self) -> None:
        self.laps.step(time.monotonic())

    def barrier(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        import torch.distributed as dist

        box = [data]
        if dist.is_initialized():
            dist.broadcast_object_list(box, src=0)
        return box[0]


def run_train_loop(
    loop: Callable[..., Any],
    config: Mapping[str, Any],
    context: RankContext,
    channel: Channel,
    telemetry: Telemetry,
    job: TrialJob,
    names: Collection[str] = (),
) -> RankOutcome:
    """Run the loop with the trial's config; measure load and energy over the whole loop, and the time of its steps.

    Args:
        names: of the loop's own options, which it gets even if a setting of scripts has the same name.
    """
    session = ReportingUtils(context, channel)
    set_train_fn_utils(session)
    receive_with(session)
    settings = script_settings(config, names)
    of_raypar = {*OWN_KEYS, *(SCRIPT_SETTINGS.keys() - names)}
    config = {key: value for key, value in config.items() if key not in of_raypar}
    startup_s = time.monotonic() - context.requested_at_s
    stopped = False
    memory = MemoryMonitor(telemetry.device)
    with scratch_folder() as folder, private_store(job, is_first=context.rank == 0) as private:
        recorder = observe(str(folder), {**settings, **private.settings})
        memory.start()
        telemetry.start()
        try:
            loop(config) if inspect.signature(loop).parameters else loop()
        except StopTrial:
            stopped = True
        telemetry.stop()
        memory.stop()
        recorder.close()
        logged = private.keep()
        stopped = stopped or session.report_logged(logged, job.settings.metric)
        ranks, why_not = read_ranks(folder)
        if not stopped:
            check_applied(settings, folder, context.rank, ranks, why_not)
    outcome = RankOutcome(
        stopped=stopped,
        startup_s=startup_s,
        conditions=RankConditions(**telemetry.summary(), **memory.summary(), logged_elsewhere=logged.overruled or None),
        counters=telemetry.counters(),
    )
    return with_times(outcome, session.laps.result(), ranks, why_not)
