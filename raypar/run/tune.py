"""Trials as a Ray Tune study over warm gangs.

Tune sees thin trainables on the head node, which ask the broker to run a trial and wait. So Tune's searchers,
schedulers and stoppers work as usual. All trainables are identical, so Tune's actor cache always hits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import ray
from ray import tune
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.tune import TuneError
from ray.tune.execution import class_cache
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher

from raypar.errors import ClusterError, RayparError
from raypar.files import FilePiece, append_piece
from raypar.masking import is_secret
from raypar.run.broker import Broker
from raypar.run.cluster import TRAIN_ENVIRONMENT
from raypar.run.dispatcher import ArtifactPiece, DispatchConfig
from raypar.run.pool import GangPolicy
from raypar.run.runner import ClusterChanged, Event, Listener, More, Notice, TrialEnded, TrialStarted
from raypar.run.search import TuneReports, for_run, point_of, tune_space
from raypar.signals import Interrupted, abort_reason, raise_again, uninterrupted, was_interrupted
from raypar.study.study import Study
from raypar.study.trial import TrialSpec, TrialState
from raypar.trace import mark
from raypar.train.affinity import Core, ProcessTree
from raypar.train.job import ARTIFACT_FOLDER, RunSettings

# A sliver of the head node and no CPU, since trainables only wait. (Tune refuses an empty request.)
ON_HEAD = {"cpu": 0, "node:__internal_head__": 0.001}


class TrialFailed(RuntimeError):
    """A trial ended without a usable result, for Tune and searchers. The broker's result has the reason."""


class BrokeredTrial(tune.Trainable):  # type: ignore[misc]
    """Tune's trainable. It waits for a trial's reports at the broker, and passes on those that can be compared.

    If a trial ends with a loss or metric that is not finite, searchers and schedulers see an error, which all of them
    can handle.
    """

    _reports: TuneReports

    def setup(self, config: dict[str, Any]) -> None:
        # By name: a handle in the config would make Tune treat every restart as a new study.
        self._broker = ray.get_actor(config["broker"])
        self.reset_config(config)

    def step(self) -> dict[str, Any]:
        while True:
            reports, state = ray.get(self._broker.follow.remote(self.trial_id, self._seen))
            for report in reports:
                self._seen += 1
                if (seen := self._reports.take(report)) is not None and self.config["in_lockstep"]:
                    return seen
            if state is None:
                continue
            if not TrialState(state).traits.is_usable:
                raise TrialFailed(self.trial_id)
            # Repeated at the trial's end, the only report that a searcher learns from.
            return {**self._reports.last, "done": True}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        metric, mode, target = (new_config.get(key) for key in ("study_metric", "mode", "target"))
        self._seen, self._reports = 0, TuneReports(metric or "", mode or "", target)
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return {}

    def load_checkpoint(self, checkpoint: Any) -> None:
        pass


class BlockSearcher(Searcher):  # type: ignore[misc]
    """Tune's searcher that suggests the given trials, and then asks for more.

    All blocks run in one Tune run, so that gangs stay warm between them.

    Args:
        specs: the first trials; further ones are added to the list.
        add: tells the broker of further ones.
        num_ended: returns the number of trials whose end was passed on.
        max_concurrent: maximum number of trials at a time.
    """

    def __init__(
        self,
        specs: list[TrialSpec],
        more: More,
        add: Callable[[Sequence[TrialSpec]], object],
        num_ended: Callable[[], int],
        max_concurrent: int,
    ) -> None:
        super().__init__()
        self._specs, self._more, self._add, self._num_ended = specs, more, add, num_ended
        self._num_given = 0
        self._live: set[str] = set()
        self.max_concurrent = max_concurrent

    def suggest(self, trial_id: str) -> dict[str, int] | str | None:
        """Return the next trial's index in the specs, None while there is none, or `FINISHED`."""
        if len(self._live) >= self.max_concurrent:
            return None
        if self._num_given == len(self._specs):
            if self._live or self._num_ended() < self._num_given:
                return None
            added = self._more()
            self._specs += added
            self._add(added)
            if self._num_given == len(self._specs):
                return str(Searcher.FINISHED)
        self._live.add(trial_id)
        self._num_given += 1
        return {"order": self._num_given - 1}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self._live.discard(trial_id)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # as for the callback

    def save(self, checkpoint_path: str) -> None:
        pass

    def restore(self, checkpoint_path: str) -> None:
        pass


class Inbox:
    """Artifacts of trials on other machines, received into the driver's log folder.

    They are moved into place once they are complete.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._open: set[str] = set()  # identities of the trials whose artifacts are accepted

    def _partial(self, identity: str) -> Path:
        return self._log_dir / identity / f"{ARTIFACT_FOLDER}.partial"

    def begin(self, identity: str) -> None:
        """Accept artifacts of a starting trial; drop those of an earlier attempt."""
        self.close(identity)
        self._open.add(identity)

    def take(self, identity: str, piece: FilePiece | None) -> None:
        """Write a piece; None: end of the artifacts.

        Raises:
            ValueError: the trial is closed, or the piece is not a valid next one.
            OSError: it can't be written.
        """
        if identity not in self._open:
            raise ValueError("no further pieces are accepted")
        partial, folder = self._partial(identity), self._log_dir / identity / ARTIFACT_FOLDER
        if piece is not None:
            append_piece(partial, piece)
        elif partial.exists():
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)

    def close(self, identity: str) -> None:
        """Accept no more artifacts of a trial, and remove incomplete ones."""
        self._open.discard(identity)
        shutil.rmtree(self._partial(identity), ignore_errors=True)

    def close_all(self) -> None:
        for identity in tuple(self._open):
            self.close(identity)


@dataclass(frozen=True)
class Ahead:
    """Work of the driver beside trials, on a machine that is used by their study alone.

    Attributes:
        num_cores: of the machine. A trial on fewer cores may begin while the driver stores the result before it.
        store: finishes what is left to do beside a trial; called before one that takes all cores.
    """

    num_cores: int
    store: Callable[[], object]


class ResultCallback(tune.Callback):  # type: ignore[misc]
    """Tune's callback on the driver. It defines trials, and passes on the broker's events in the main thread.

    Args:
        spec_of: returns the spec of a Tune trial's config; None: the broker has the specs.
        generator: draws points or suggests trials. Its limit of concurrent trials follows the cluster.
        inbox: receives artifacts of trials on other machines.
        ahead: work of the driver beside trials; None: none.
    """

    def __init__(
        self,
        broker: Any,
        listener: Listener,
        spec_of: Callable[[Mapping[str, Any]], TrialSpec] | None,
        generator: BasicVariantGenerator | BlockSearcher | None,
        inbox: Inbox,
        ahead: Ahead | None = None,
    ) -> None:
        self._broker, self._listener, self._spec_of, self._generator = broker, listener, spec_of, generator
        self._inbox, self._ahead = inbox, ahead
        self._running: set[str] = set()  # Tune's trials
        self._ended: set[str] = set()  # uids of trials whose result was passed on, while Tune has not noticed their end
        self._num_events = 0
        self._reply: Any = None
        self.num_ended = 0
        self.error: Exception | None = None  # the listener's; Tune wraps it into its own error

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks for a restore, which raypar doesn't use

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        raise_again()
        self.pass_on(timeout_s=0)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if trial.trial_id not in self._running:
            self._running.add(trial.trial_id)
            spec = self._spec_of(trial.config) if self._spec_of else None
            # Without a spec, it is the next one that the broker has, if that did not begin ahead.
            if self._ahead and (spec is None or spec.placement.num_cpus >= self._ahead.num_cores):
                self._ahead.store()
            ray.get(self._broker.define.remote(trial.trial_id, spec))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Tune doesn't tell a trainable in its cache that a scheduler stopped its trial.
        self._end(trial.trial_id, let_finish=False)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # If only the trainable was lost, its trial keeps running and will have a result. The trainable may not even
        # have started.
        self.on_trial_start(iteration, trials, trial)
        self._end(trial.trial_id, let_finish=True)

    def _end(self, tune_id: str, *, let_finish: bool) -> None:
        if tune_id not in self._running or self.error is not None:  # its end may have come with the one that failed
            return
        self._running.remove(tune_id)
        with uninterrupted():
            uid = ray.get(self._broker.release.remote(tune_id, let_finish=let_finish))
            while uid not in self._ended:
                self.pass_on(timeout_s=None)
        self._ended.remove(uid)

    def pass_on(self, timeout_s: float | None) -> None:
        """Pass on the events that come within the timeout; None: wait for one."""
        self._reply = self._reply or self._broker.events.remote(self._num_events)
        if not ray.wait([self._reply], timeout=timeout_s)[0]:
            return
        with uninterrupted():
            events: list[tuple[str, Event | ArtifactPiece]] = ray.get(self._reply)
            self._num_events += len(events)
            self._reply = self._broker.events.remote(self._num_events)
            for uid, event in events:
                if isinstance(event, ArtifactPiece):
                    self._take(uid, event)
                    continue
                if isinstance(event, TrialStarted):
                    self._inbox.begin(event.spec.identity)
                elif isinstance(event, ClusterChanged) and self._generator is not None:
                    self._generator.max_concurrent = event.num_slots
                elif isinstance(event, TrialEnded):
                    self._inbox.close(event.result.spec.identity)
                    self._ended.add(uid)
                    self.num_ended += 1
                try:
                    self._listener(event)
                except Exception as error:
                    self.error = self.error or error
                    raise

    def _take(self, uid: str, piece: ArtifactPiece) -> None:
        """Store a piece of a trial's artifacts and request the next one, unless storing fails."""
        problem = ""
        try:
            self._inbox.take(piece.identity, ray.get(piece.content[0]) if piece.content else None)
        except (RayError, OSError, ValueError) as error:
            self._inbox.close(piece.identity)
            problem = f"{type(error).__name__}: {error}"
        self._broker.piece_taken.remote(uid, piece.attempt, problem)


QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "100000",  # studies resume from the store, not from Tune's snapshots
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # it would wait ten seconds for the running trials
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_STATE_REFRESH_PERIOD": "1e9",  # a refresh would wait forever for a head that was killed
    "RAY_AIR_NEW_OUTPUT": "0",
}
MAX_CALLS = 100_000  # open calls of the broker: one per node of a gang, and one per worker while its gang starts
MAX_LOST = 4  # brokers lost in a row, with no trial that ended in between
ANSWER_TIMEOUT_S = 10.0


NO_ADDRESSES: Mapping[str, str] = {}


class BrokerLost(RuntimeError):
    """The actor that owns the gangs has died."""


class TuneRunner:
    """Runs a study on the Ray that this process is connected to.

    Args:
        owns_cluster: no one else uses that Ray (see `GangPolicy`).
        fork_addresses: addresses of this machine's running fork servers, by revision label.
        cores: cores that trials may use, if no one else uses that Ray; None: all.
        own_ray: processes that leave these cores to the trials once the first is about to start; None: none.
        forks_ahead: the process of the next trial is forked while a trial starts.
        ahead: work of the driver beside trials; None: none.
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        owns_cluster: bool,
        fork_addresses: Mapping[str, str] = NO_ADDRESSES,
        max_parked_gangs: int = 4,
        cores: Sequence[Core] | None = None,
        own_ray: ProcessTree | None = None,
        forks_ahead: bool = True,
        ahead: Ahead | None = None,
    ) -> None:
        self._settings, self._ahead = settings, ahead
        num_parked = max_parked_gangs * max(1, len(settings.revisions))
        self._policy = GangPolicy(owns_cluster, num_parked, fork_addresses, cores, own_ray, forks_ahead)

    def run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener, more: More | None = None) -> None:
        """Run the specs (see `raypar.run.runner.Runner`). Replace a lost broker and rerun its running trials."""
        ended: list[TrialSpec] = []
        given = list(specs)

        def ask() -> Sequence[TrialSpec]:
            added = more() if more else ()
            given.extend(added)
            return added

        def listen(event: Event) -> None:
            if isinstance(event, TrialEnded):
                ended.append(event.result.spec)
            listener(event)

        num_lost, num_before = 0, 0
        while True:
            done = {spec.identity for spec in ended}
            left = [*given, *ended] if study.is_search else [spec for spec in given if spec.identity not in done]
            if not left and more is not None:
                left = list(ask())  # the broker was lost between two blocks
            if not left and not study.is_search:
                return
            try:
                self._run(study, left, listen, ask if more else None)
                return
            except BrokerLost as lost:
                num_lost = 1 if len(ended) > num_before else num_lost + 1
                num_before = len(ended)
                if num_lost == MAX_LOST:
                    message = f"the broker of the trials was lost {num_lost} times in a row"
                    hint = "the head node may be short of memory; finished trials are kept"
                    raise ClusterError(message, hint=hint) from lost
                listen(Notice("the broker of the trials was lost; running trials start again"))

    def _run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener, more: More | None) -> None:
        """Raises BrokerLost."""
        os.environ.update(QUIET)
        # Tune gives its actors the AWS keys, which Ray then writes into its logs and onto command lines. Ranks get
        # what the trial's code needs from the `RunSettings`.
        class_cache.ENV_VARS_TO_PROPAGATE -= {
            name for name in class_cache.ENV_VARS_TO_PROPAGATE if is_secret(name, "-")
        }
        name = f"raypar-{os.getpid()}-{time.time_ns()}"
        config = DispatchConfig(
            workload=cloudpickle.dumps(study.workload),
            settings=self._settings,
            gangs=self._policy,
            max_retries=study.max_retries,
            in_lockstep=in_lockstep(study),
            max_trials=study.max_concurrent_trials,
            metric=study.judged_by.name,
            num_cores=self._ahead.num_cores if self._ahead and not in_lockstep(study) else 0,
        )
        mark("tuner: broker asked for")
        options: dict[str, Any] = {"resources": {"node:__internal_head__": 0.001}, "max_concurrency": MAX_CALLS}
        if not self._policy.owns_cluster:
            options["runtime_env"] = {"env_vars": TRAIN_ENVIRONMENT}
        broker = ray.remote(num_cpus=0)(Broker).options(name=name, **options).remote(config)
        is_ray_lost = False
        try:
            num_slots = ray.get(broker.start.remote(() if study.is_search else tuple(specs)))
            mark("tuner: broker is up")
            self._tune(study, specs, name, broker, num_slots, listener, more)
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
            if not is_ray_lost:
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
        broker: Any,
        num_slots: int,
        listener: Listener,
        more: More | None,
    ) -> None:
        given = list(specs)
        order, drawn = itertools.count(), Counter(tuple(spec.point.items()) for spec in specs)

        def make_spec(tune_config: Mapping[str, Any]) -> TrialSpec:
            """Make a trial from a point that Tune drew. A point that was drawn before gives a repeat."""
            point = point_of(study, tune_config)
            repeat = drawn[tuple(point.items())]
            drawn[tuple(point.items())] += 1
            return study.trial(point, repeat, order=next(order), auto=self._settings.auto)

        space: dict[str, Any] = {
            "broker": name,
            "in_lockstep": in_lockstep(study),
            "study_metric": study.judged_by.name,
            "mode": study.judged_by.mode,
            "target": study.target,
        }
        count = 1
        spec_of: Callable[[Mapping[str, Any]], TrialSpec] | None = None
        generator: BasicVariantGenerator | BlockSearcher | None = None
        if study.is_search:
            space |= tune_space(study)
            num_grid_points = len(study.points())
            num_missing = study.num_trials * num_grid_points - len(specs)  # specs: what a search has done already
            count = -(-num_missing // num_grid_points)  # Tune draws this number for every grid point
            spec_of = make_spec
        elif more is not None:
            count = -1

            def add(added: Sequence[TrialSpec]) -> None:
                ray.get(broker.add.remote(tuple(added)))

            generator = BlockSearcher(given, more, add, lambda: callback.num_ended, num_slots)
        else:
            space["order"] = tune.grid_search(list(range(len(specs))))
        if study.searcher is None and generator is None:
            # A continued search must draw other points than before.
            generator = BasicVariantGenerator(max_concurrent=num_slots, random_state=study.seed + len(specs))
        inbox = Inbox(self._settings.driver_dir or self._settings.log_dir)
        callback = ResultCallback(broker, listener, spec_of, generator, inbox, self._ahead)
        tuner = self._tuner(study, space, count, generator, callback, num_slots)
        mark("tuner: fit")
        try:
            results = tuner.fit()
        except Interrupted:
            callback.pass_on(timeout_s=0)  # keep the trials whose end Tune has not noticed
            raise
        except TuneError:
            if callback.error is None:
                raise
            raise callback.error from None
        finally:
            inbox.close_all()
        mark("tuner: fit is over")
        expected = len(given) if not study.is_search else len(results)
        if callback.num_ended < expected:
            if not was_interrupted() and _is_lost(broker):
                raise BrokerLost
            raise Interrupted

    def _tuner(
        self,
        study: Study,
        space: Mapping[str, Any],
        num_samples: int,
        generator: BasicVariantGenerator | BlockSearcher | None,
        callback: ResultCallback,
        num_slots: int,
    ) -> tune.Tuner:
        """Return the tuner of a study's trials. Tune starts only as many as can run at a time."""
        searcher, scheduler = for_run(study)
        if isinstance(searcher, ConcurrencyLimiter):
            searcher.max_concurrent = min(searcher.max_concurrent, num_slots)
        is_limited = not isinstance(searcher, Searcher) or isinstance(searcher, ConcurrencyLimiter)
        return tune.Tuner(
            tune.with_resources(BrokeredTrial, ON_HEAD),
            param_space=dict(space),
            tune_config=tune.TuneConfig(
                num_samples=num_samples,
                search_alg=searcher or generator,
                scheduler=scheduler,
                max_concurrent_trials=None if is_limited else num_slots,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="tune", storage_path=str(self._settings.log_dir), verbose=0, callbacks=[callback]
            ),
        )


def in_lockstep(study: Study) -> bool:
    """Return whether trials wait after each report for a decision: by a scheduler, or because of the target."""
    return study.scheduler is not None or study.target is not None


def _is_lost(broker: Any) -> bool:
    try:
        with contextlib.suppress(GetTimeoutError):
            ray.get(broker.__ray_ready__.remote(), timeout=ANSWER_TIMEOUT_S)
    except RayActorError:
        return True
    return False
