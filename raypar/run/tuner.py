"""Trials as a Ray Tune study over warm gangs.

Tune sees thin trainables on the head node, which ask the broker to run something and wait. So whatever searches,
schedules or stops in Tune works as ever.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import ray
from ray import tune
from ray.exceptions import GetTimeoutError, RayActorError
from ray.tune import TuneError
from ray.tune.search import BasicVariantGenerator

from raypar.errors import ClusterError, RayparError
from raypar.run.broker import Broker
from raypar.run.brokered import ON_HEAD, BrokeredTrial, Driver
from raypar.run.cluster import TRAIN_ENVIRONMENT
from raypar.run.dispatch import DispatchConfig
from raypar.run.events import Event, Listener, Notice, TrialEnded
from raypar.run.gangs import GangPolicy
from raypar.run.listening import Ears, Slots
from raypar.run.runner import RunSettings
from raypar.signals import Interrupted, abort_reason, was_interrupted
from raypar.study.space import Choice, Domain, Grid, LogUniform, RandInt, Uniform
from raypar.study.study import Study
from raypar.study.trial import TrialSpec
from raypar.trace import mark

QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "100000",  # resuming goes by the store, not by Tune's snapshots
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # it would wait for the running trials, ten seconds long
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_STATE_REFRESH_PERIOD": "1e9",  # it asks Ray's head, and waits without end for one that was killed
    "RAY_AIR_NEW_OUTPUT": "0",
}


MAX_LOST = 4  # brokers, one after the other, without a trial that has ended between them
ANSWER_TIMEOUT_S = 10.0
LOST = "the broker of the trials was lost; what ran is run again"
LOST_AGAIN = "the broker of the trials was lost {} times, one after the other"
LOST_HINT = "is the head node short of memory? what has ended is kept"


class BrokerLost(RuntimeError):
    """The actor that owns the gangs has died."""


class TuneRunner:
    """Runs a study on the Ray that this process is connected to.

    Args:
        owns_cluster: nobody else uses that Ray (see `GangPolicy`).
        fork_address: of the fork server of this machine, if there is one already.
    """

    def __init__(
        self, settings: RunSettings, *, owns_cluster: bool, fork_address: str = "", max_parked_gangs: int = 4
    ) -> None:
        self._settings = settings
        self._policy = GangPolicy(owns_cluster, max_parked_gangs, fork_address)

    def run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener) -> None:
        """As `raypar.run.runner.Runner` says. A broker that is lost is replaced, and what ran is run again."""
        ended: list[TrialSpec] = []

        def listen(event: Event) -> None:
            if isinstance(event, TrialEnded):
                ended.append(event.result.spec)
            listener(event)

        num_lost = 0
        while True:
            num_before = len(ended)
            done = {spec.identity for spec in ended}
            left = [*specs, *ended] if study.is_search else [spec for spec in specs if spec.identity not in done]
            try:
                self._run(study, left, listen)
                return
            except BrokerLost as lost:
                num_lost = 1 if len(ended) > num_before else num_lost + 1
                if num_lost == MAX_LOST:
                    raise ClusterError(LOST_AGAIN.format(num_lost), hint=LOST_HINT) from lost
                listen(Notice(LOST))

    def _run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener) -> None:
        """Raises BrokerLost."""
        os.environ.update(QUIET)
        name = f"raypar-{os.getpid()}-{time.time_ns()}"
        config = DispatchConfig(
            workload=cloudpickle.dumps(study.workload),
            settings=self._settings,
            policy=self._policy,
            max_retries=study.max_retries,
            in_lockstep=study.scheduler is not None,
            max_trials=study.max_concurrent_trials,
        )
        mark("tuner: broker asked for")
        options: dict[str, Any] = {"resources": {"node:__internal_head__": 0.001}, "max_concurrency": 1000}
        if not self._policy.owns_cluster:
            options["runtime_env"] = {"env_vars": TRAIN_ENVIRONMENT}
        broker = ray.remote(num_cpus=0)(Broker).options(name=name, **options).remote(config)
        ears: Ears | None = None
        is_ray_lost = False
        try:
            num_slots = ray.get(broker.start.remote(() if study.is_search else tuple(specs)))
            mark("tuner: broker is up")
            slots = Slots(num_slots, listener)
            ears = Ears(broker, slots)
            self._tune(study, specs, name, config.in_lockstep, broker, ears, slots)
        except (RayActorError, TuneError, RuntimeError) as error:
            if isinstance(error, RayparError) or not _is_lost(broker):
                raise
            raise BrokerLost from error
        except KeyboardInterrupt:
            if (lost := abort_reason()) is None:
                raise
            is_ray_lost = True
            raise lost from None
        finally:
            if ears:
                ears.close()
            if not is_ray_lost:
                self._end(broker)

    def _end(self, broker: Any) -> None:
        with contextlib.suppress(RayActorError):
            if not self._policy.owns_cluster:  # otherwise its gangs end with it, at once
                ray.get(broker.close.remote())
        ray.kill(broker)
        mark("tuner: closed")

    def _tune(
        self,
        study: Study,
        specs: Sequence[TrialSpec],
        name: str,
        in_lockstep: bool,
        broker: Any,
        ears: Ears,
        slots: Slots,
    ) -> None:
        space: dict[str, Any] = {"broker": name, "in_lockstep": in_lockstep}
        if study.is_search:
            space |= {key: _tune_domain(domain) for key, domain in study.space.items()}
            num_grid_points = len(study.points())
            num_missing = study.num_trials * num_grid_points - len(specs)  # specs: what a search has done already
            count = -(-num_missing // num_grid_points)  # Tune draws so many for every grid point
            order = itertools.count()
            drawn = Counter(tuple(spec.point.items()) for spec in specs)
            device = self._settings.default_device

            def drawn_spec(tune_config: Mapping[str, Any]) -> TrialSpec:
                point = {key: tune_config[key] for key in study.space}
                # What is drawn again is a repeat, and a trial of its own.
                repeat = drawn[tuple(point.items())]
                drawn[tuple(point.items())] += 1
                return study.trial(point, repeat, order=next(order), default_device=device)

        else:
            space["order"] = tune.grid_search(list(range(len(specs))))
            count = 1
        driver = Driver(broker, drawn_spec if study.is_search else None, ears)
        searcher = study.searcher
        num_concurrent: int | None = slots.count
        if searcher is None:
            # A search that goes on draws anew, not what it has drawn before.
            searcher = BasicVariantGenerator(max_concurrent=slots.count, random_state=study.seed + len(specs))
            slots.follow(searcher)
            num_concurrent = None
        needs_metric = study.searcher is not None or study.scheduler is not None
        tuner = tune.Tuner(
            tune.with_resources(BrokeredTrial, ON_HEAD),
            param_space=space,
            tune_config=tune.TuneConfig(
                num_samples=count,
                search_alg=searcher,
                scheduler=study.scheduler,
                metric=study.metric if needs_metric else None,
                mode=study.mode if needs_metric else None,
                max_concurrent_trials=num_concurrent,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="tune", storage_path=str(self._settings.log_dir), verbose=0, callbacks=[driver]
            ),
        )
        mark("tuner: fit")
        results = tuner.fit()
        mark("tuner: fit is over")
        expected = len(specs) if not study.is_search else len(results)
        if driver.num_ended < expected:
            if not was_interrupted() and _is_lost(broker):
                raise BrokerLost
            raise Interrupted


def _is_lost(broker: Any) -> bool:
    try:
        ray.get(broker.__ray_ready__.remote(), timeout=ANSWER_TIMEOUT_S)
    except RayActorError:
        return True
    except GetTimeoutError:
        return False
    return False


def _tune_domain(domain: Domain) -> Any:
    match domain:
        case Grid(values):
            return tune.grid_search(list(values))
        case Choice(values):
            return tune.choice(list(values))
        case Uniform(low, high):
            return tune.uniform(low, high)
        case LogUniform(low, high):
            return tune.loguniform(low, high)
        case RandInt(low, high):
            return tune.randint(low, high)
