"""Trials as a Ray Tune study over warm gangs.

Tune sees thin trainables on the head node, which ask the broker to run something and wait. So whatever searches,
schedules or stops in Tune works as ever.

All of Tune's trials are alike, so that its actor cache always hits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import ray
from ray import tune
from ray.exceptions import GetTimeoutError, RayActorError
from ray.tune import TuneError
from ray.tune.search import BasicVariantGenerator

from raypar.errors import ClusterError, RayparError
from raypar.run.broker import Broker
from raypar.run.cluster import TRAIN_ENVIRONMENT
from raypar.run.dispatcher import DispatchConfig
from raypar.run.gang_pool import GangPolicy
from raypar.run.runner import ClusterChanged, Event, Listener, Notice, TrialEnded
from raypar.signals import Interrupted, abort_reason, uninterrupted, was_interrupted
from raypar.study.space import Choice, Domain, Grid, LogUniform, RandInt, Uniform
from raypar.study.study import Study
from raypar.study.trial import TrialSpec, TrialState
from raypar.trace import mark
from raypar.train.job import RunSettings


class Slots:
    """How many trials Tune lets run at a time; more where machines join. A listener that passes on what it hears."""

    def __init__(self, count: int, listener: Listener) -> None:
        self.count, self._listener = count, listener
        self._generator: BasicVariantGenerator | None = None

    def follow(self, generator: BasicVariantGenerator) -> None:
        """From now on this one is told."""
        self._generator = generator
        generator.max_concurrent = self.count

    def __call__(self, event: Event) -> None:
        if isinstance(event, ClusterChanged):
            self.count = event.num_slots
            if self._generator is not None:
                self._generator.max_concurrent = self.count
        self._listener(event)


class Ears:
    """Listens to the broker's news in a thread; what it tells comes one event at a time."""

    def __init__(self, broker: Any, listener: Listener) -> None:
        self._broker, self._listener = broker, listener
        self._lock = threading.Lock()
        self._closed = False
        self._num_heard = 0
        self._heard = threading.Condition()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def tell(self, event: Any) -> None:
        with self._lock:
            self._listener(event)

    def catch_up(self, num_news: int) -> None:
        """Wait until so many news have been told, so that what came before a trial's end is told before it."""
        with self._heard:
            while self._num_heard < num_news and self._thread.is_alive():
                self._heard.wait(1.0)

    def close(self) -> None:
        self._closed = True

    def _listen(self) -> None:
        while not self._closed:
            try:
                events = ray.get(self._broker.news.remote())
            except Exception:  # the broker is gone, and with it the news
                return
            for event in events:
                self.tell(event)
            with self._heard:
                self._num_heard += len(events)
                self._heard.notify_all()


# A sliver of the head node and no CPU: trainables wait, they don't work. (An empty request is refused.)
ON_HEAD = {"cpu": 0, "node:__internal_head__": 0.001}


class TrialFailed(RuntimeError):
    """Tells Tune (and a searcher) that a trial gave no result; the broker's result says why."""


class BrokeredTrial(tune.Trainable):  # type: ignore[misc]
    """What Tune runs: asks the broker, waits, and hands the reports on."""

    def setup(self, config: dict[str, Any]) -> None:
        # By name: a handle in the config would make Tune treat every restart as a new study.
        self._broker = ray.get_actor(config["broker"])
        self._seen = 0

    def step(self) -> dict[str, Any]:
        while True:
            reports, state = ray.get(self._broker.follow.remote(self.trial_id, self._seen))
            if reports and self.config["in_lockstep"]:
                self._seen += 1
                return {**reports[0], "done": False}
            self._seen += len(reports)
            self._last = reports[-1] if reports else getattr(self, "_last", {})
            if state == TrialState.FAILED:
                raise TrialFailed(self.trial_id)
            if state is not None:
                return {**self._last, "done": True}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._seen, self._last = 0, {}
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return {}

    def load_checkpoint(self, checkpoint: Any) -> None:
        pass


class Driver(tune.Callback):  # type: ignore[misc]
    """On the driver: says what each Tune trial is to do, and takes its result at once when it ends.

    Args:
        spec_of: makes a trial of what a search drew; None where the broker knows the trials.
    """

    def __init__(self, broker: Any, spec_of: Callable[[Mapping[str, Any]], TrialSpec] | None, ears: Ears) -> None:
        self._broker, self._spec_of, self._ears = broker, spec_of, ears
        self._running: set[str] = set()
        self.num_ended = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks for a restore that is not used here

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if trial.trial_id not in self._running:
            self._running.add(trial.trial_id)
            spec = self._spec_of(trial.config) if self._spec_of else None
            ray.get(self._broker.define.remote(trial.trial_id, spec))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if trial.trial_id in self._running:
            # Where it is only the trainable that was lost, its trial still runs, and has a result in the end.
            ray.get(self._broker.run_on.remote(trial.trial_id))
        self._end(trial.trial_id)

    def _end(self, trial_id: str) -> None:
        if trial_id not in self._running:
            return
        self._running.discard(trial_id)
        with uninterrupted():  # a trial that has ended is told
            self._tell_end(trial_id)

    def _tell_end(self, trial_id: str) -> None:
        # Tune doesn't tell a trainable in its cache that a scheduler stopped its trial.
        self._broker.stop.remote(trial_id)
        result, artifacts, num_news = ray.get(self._broker.take.remote(trial_id))
        self._ears.catch_up(num_news)
        self.num_ended += 1
        # Before Tune starts the next trial: writing the result takes no time from a trial that is being timed.
        self._ears.tell(TrialEnded(result, artifacts))


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
