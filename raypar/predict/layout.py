"""Layouts: the ways to divide a training step among workers, which of them a model can take, and their predicted times.

Strategies list their own ways (`StrategyTraits.layouts`). Accumulation and activation checkpointing go with each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raypar.errors import RayparError
from raypar.predict.network import Network, all_reduce_cost
from raypar.study.memory_fit import MemoryFit
from raypar.study.options import OPTIONS, has_effect, resolve
from raypar.study.space import Value
from raypar.study.strategy import STRATEGIES, layout_of, pipeline_size
from raypar.study.study import Study
from raypar.study.validation import Machines, validate
from raypar.study.workload import Config, Workload

Settings = Mapping[str, Value]
ACCUMULATIONS = (1, 4)
BASELINE: Settings = {"strategy": "ddp", "accumulation_steps": 1, "activation_checkpointing": False}


@dataclass(frozen=True)
class Message:
    """Collective that a rank takes part in.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, broadcast or recv.
        num_bytes: of the complete tensor.
        num_ranks: members of its group.
    """

    kind: str
    num_bytes: int
    num_ranks: int


@dataclass(frozen=True)
class RankStep:
    """Step of a rank: seconds of its own work, and its messages."""

    compute_s: float
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class StepLayout:
    """A way to divide a step.

    Attributes:
        settings: the options in which layouts differ, complete.
        config: of its trials, complete.
        memory_bytes: range of a worker's predicted peak; None: not predicted.
        fit: whether that fits; None: no limit was given, or nothing is predicted.
        predicted_s: seconds of a step; None: `problem` says why there is no prediction.
    """

    settings: Settings
    config: Config
    memory_bytes: tuple[float, float] | None = None
    fit: MemoryFit | None = None
    predicted_s: float | None = None
    problem: str = ""

    @property
    def is_baseline(self) -> bool:
        """True for plain data parallelism."""
        return all(self.settings.get(key) == value for key, value in BASELINE.items())

    @property
    def shown(self) -> dict[str, Value]:
        """Strategy, a pipeline's schedule, and other settings that differ from the defaults."""
        return {
            key: value
            for key, value in self.settings.items()
            if key == "strategy" or (has_effect(key, self.config) and not self._is_default(key, value))
        }

    def _is_default(self, key: str, value: Value) -> bool:
        if key in ("pipeline_schedule", "num_microbatches"):
            return pipeline_size(self.config) == 1
        return OPTIONS[key].default == value

    @property
    def words(self) -> str:
        """``--set`` of a command line: ``strategy=fsdp shard_size=2``."""
        return " ".join(f"{key}={value}" for key, value in self.shown.items())

    @property
    def family(self) -> tuple[Value, ...]:
        """Split parts, without schedules and the like: layouts of one family have similar times."""
        keys = ("strategy", "shard_size", "tensor_size", "pipeline_size")
        return tuple(self.settings.get(key) for key in keys)


def question_of_layout(study: Study, num_workers: int) -> tuple[dict[str, Value], dict[str, tuple[Value, ...]]]:
    """Return a study's fixed settings, and the values that the layouts may have besides their own: the precision.

    Raises:
        RayparError: the study sweeps what is not part of a layout.
    """
    of_layout = layout_keys()
    fixed = {key: value for key, value in study.config.items() if key not in of_layout}
    widened: dict[str, tuple[Value, ...]] = {}
    for key, domain in study.space.items():
        values = tuple(getattr(domain, "values", ()))
        if key in of_layout or key == "num_workers":
            continue
        if len(values) == 1 or key in study.baseline:
            fixed[key] = values[0] if len(values) == 1 else study.baseline[key]
        elif key == "precision" and values:
            widened[key] = values
        else:
            shown = values[0] if values else "VALUE"
            hint = f"choose a value: --set {key}={shown}"
            raise RayparError(f"{key}: the study sweeps it, and layouts are compared for one training", hint=hint)
    return {**fixed, "num_workers": num_workers}, widened


def layout_keys() -> tuple[str, ...]:
    """Return the options in which layouts differ."""
    of_strategies = [key for _, way in _ways(12) for key in way]  # 12 has all kinds of meshes
    return tuple(dict.fromkeys(("strategy", "accumulation_steps", "activation_checkpointing", *of_strategies)))


def _ways(num_workers: int) -> Iterator[tuple[str, Settings]]:
    for name, traits in STRATEGIES.items():
        if traits.layouts is not None:
            yield from ((name, way) for way in traits.layouts(num_workers))


def legal_layouts(
    workload: Workload,
    fixed: Settings,
    widened: Mapping[str, Sequence[Value]],
    machines: Machines,
    check_strategy: Callable[[Workload, Config], tuple[str, str] | None],
    device: str = "cpu",
) -> tuple[StepLayout, ...]:
    """Return every layout that the checks of a plan accept, on enough machines.

    Args:
        fixed: settings of all layouts, with the number of workers.
        widened: values of other options to combine with.
        machines: whose size does not matter.
        check_strategy: whether a strategy can split the model.
        device: the meaning of ``device="auto"``.

    Raises:
        RayparError: the data can't be prepared for any layout, for example because its files are missing.
    """
    num_workers = fixed["num_workers"]
    assert isinstance(num_workers, int)
    keys = layout_keys()
    legal: list[StepLayout] = []
    unprepared: list[RayparError] = []
    more = {"accumulation_steps": ACCUMULATIONS, "activation_checkpointing": (False, True), **widened}
    for name, way in _ways(num_workers):
        for values in itertools.product(*more.values()):
            chosen = {"strategy": name, **way, **dict(zip(more, values, strict=True))}
            # All layouts have all keys, so that they are points of one space.
            settings = {key: chosen.get(key, OPTIONS[key].default) for key in dict.fromkeys((*keys, *widened))}
            config = resolve(workload, {**fixed, **settings})
            if config["device"] == "auto" or ("device" not in fixed and device != config["device"]):
                config = {**config, "device": device}
            try:
                is_legal = _is_legal(workload, config, machines, check_strategy, (*keys, *widened))
            except RayparError as error:
                unprepared.append(error)
                continue
            if is_legal:
                legal.append(StepLayout(settings, config))
    if unprepared and not legal:
        raise unprepared[0]
    return tuple(legal)


def _is_legal(
    workload: Workload,
    config: Config,
    machines: Machines,
    check_strategy: Callable[[Workload, Config], tuple[str, str] | None],
    swept: Sequence[str],
) -> bool:
    if config["num_workers"] * config["accumulation_steps"] > config["batch_size"]:
        return False  # parts without samples
    workload.prepare(config)
    return not validate(config, workload, machines, swept=swept, must_fit=False, check_strategy=check_strategy)


def message_s(message: Message, network: Network, *, on_gpu: bool) -> float:
    """Return the seconds of a message, by the ring formulas of `raypar.predict.network`.

    Gloo's reduce-scatter is an all-reduce.
    """
    n, alpha, size = message.num_ranks, network.latency_s, message.num_bytes
    beta = 1 / network.bandwidth_bytes_per_s
    if n < 2:
        return 0.0
    if message.kind == "recv":
        return alpha + size * beta
    if message.kind == "broadcast":
        return alpha * (n - 1).bit_length() + size * beta
    half = (n - 1) * alpha + (n - 1) / n * size * beta
    if message.kind == "all_gather" or (message.kind == "reduce_scatter" and on_gpu):
        return half
    return float(all_reduce_cost(size, n, network, "auto" if on_gpu else "gloo").total_s)


def step_s(config: Config, steps: Sequence[RankStep], network: Network, num_cores: float, *, on_gpu: bool) -> float:
    """Return the seconds of a step.

    A pipeline of p stages with m micro-batches takes ``max(t) + (sum(t) - max(t)) / m / v`` for stages that compute
    t each and v stages per worker: the slowest stage, and the others' first micro-batch. Other ranks compute at the
    same time. Ranks that share cores take turns, which fills the bubbles. Messages overlap with the backward pass on a
    GPU, where they need no cores, if the strategy sends them meanwhile: up to two thirds of the computation.

    Args:
        steps: of a rank of each stage.
        num_cores: cores for all workers; infinity: each has its own.
    """
    computes = [step.compute_s for step in steps]
    critical_s = max(computes)
    if len(steps) > 1:
        interleaved = config["pipeline_schedule"] == "interleaved"
        rounds = config["num_microbatches"] * (config["stages_per_worker"] if interleaved else 1)
        critical_s += (sum(computes) - critical_s) / rounds
    cores = config["num_workers"] * config["cpus_per_worker"]
    crowding = 1.0 if on_gpu else max(1.0, cores / num_cores)
    sent_s = max(sum(message_s(m, network, on_gpu=on_gpu) for m in step.messages) for step in steps)
    if on_gpu and layout_of(config).num_shares == config["num_workers"]:
        sent_s = max(sent_s - 2 / 3 * critical_s, 0.1 * sent_s)
    mean_s = sum(computes) / len(computes)
    return max(critical_s, mean_s * crowding) + sent_s * crowding


def ranked(layouts: Sequence[StepLayout]) -> list[StepLayout]:
    """Return the layouts that may fit, the fastest predicted one first; those without a prediction last."""
    fitting = [each for each in layouts if each.fit is not MemoryFit.NO]
    return sorted(fitting, key=lambda each: (each.predicted_s is None, each.predicted_s or 0.0))


def leading(layouts: Sequence[StepLayout], most: int) -> list[StepLayout]:
    """Return the layouts to run: plain data parallelism, the fastest of each family, then the fastest others.

    Predictions compare layouts of one family better than families.

    Args:
        layouts: ranked.
        most: at most this many.
    """
    firsts: dict[tuple[Value, ...], StepLayout] = {}
    for each in layouts:
        firsts.setdefault(each.family, each)
    baseline = [each for each in layouts if each.is_baseline]
    order = [*baseline[:1], *firsts.values(), *layouts]
    unique = list({id(each): each for each in order}.values())
    return unique[: max(1, most)]


def with_time(layout: StepLayout, predicted_s: float | None, problem: str = "") -> StepLayout:
    """Return the layout with its predicted step time, or why there is none."""
    return replace(layout, predicted_s=predicted_s, problem=problem)
