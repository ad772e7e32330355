"""Run flags: each is one field of `RunFlags`. The command line, ``raypar store resume``, the submission to a cluster
and ``raypar ab`` derive from these fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

from raypar.errors import RayparError
from raypar.study.part import StudyPart

if TYPE_CHECKING:
    from raypar.study.overrides import FieldFlag

WHAT, WHERE, STOPS = "What runs", "Where", "When it stops"  # panels of --help
ISOLATIONS = ("warm", "fresh")
NUM_PROFILED_STEPS = 20  # unless the user gives another number
ALWAYS_STORED = ("set", "repeats", "seed", "no_ray")  # without these, an execution has no stored flags


class FlagCheck(NamedTuple):
    """Condition on a flag's value, and the message for other values."""

    holds: Callable[[Any], bool]
    problem: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Run flag.

    Attributes:
        name, type, default: those of its field in `RunFlags`.
        word: word on the command line; empty: the name with hyphens.
        help, panel: text in ``--help``, and the panel it is in.
        metavar: name of its value in ``--help``; None: derived from the type.
        given: value of a switch that is not a bool, and takes no value on the command line.
        check: check of a value other than None.
        of_study: field of `Study` that it changes, and whose value is stored; empty: none.
        needs_until: it only applies to studies that run until they are settled.
        is_resumed: ``raypar store resume`` continues with its value.
        is_submitted: it can be sent to a cluster's head.
        is_compared: ``raypar ab`` accepts it.
        without_address: hint if it is given without ``--address``; empty: it doesn't need one.
        with_address: hint if it is given with ``--address``; empty: the two go together.
    """

    name: str = ""
    type: Any = None
    default: Any = None
    word: str = ""
    help: str
    panel: str
    metavar: str | None = None
    given: object = None
    check: FlagCheck | None = None
    of_study: str = ""
    needs_until: bool = False
    is_resumed: bool = True
    is_submitted: bool = True
    is_compared: bool = True
    without_address: str = ""
    with_address: str = ""

    def read(self, stored: Mapping[str, object]) -> Any:
        """Return its value from stored ones by name. Raises TypeError if it is missing or of another type."""
        value: Any = stored.get(self.name, None if self.name in ALWAYS_STORED else self.default)
        if get_origin(self.type) is tuple:
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise TypeError(self.name)
            return tuple(value)
        kinds = get_args(self.type) or (self.type,)
        if value in (None, "") and NoneType in kinds and self.name not in ALWAYS_STORED:
            return None
        as_stored: dict[Any, Any] = {Path: str, float: (int, float)}
        if value is None or not any(isinstance(value, as_stored.get(kind, kind)) for kind in kinds):
            raise TypeError(self.name)
        return Path(value) if Path in kinds else value


def flag(panel: str, default: object, text: str, metavar: str | None = None, **properties: Any) -> Any:
    """Return a field of `RunFlags`: its default, the text of ``--help``, and further properties of `Flag`."""
    return field(default=default, metadata={"flag": Flag(help=text, panel=panel, metavar=metavar, **properties)})


what, where, stops = partial(flag, WHAT), partial(flag, WHERE), partial(flag, STOPS)


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags of a command that runs a study, in the order of ``raypar study --help``.

    A field's name is its key in the store. Stores written before a flag existed lack its key.

    Raises:
        RayparError: a value is invalid, or excludes another.
    """

    set: tuple[str, ...] = what((), "Fix a hyperparameter, or sweep it: --set num_workers=1,2.", "KEY=VALUE")
    repeats: int | None = what(None, "Number of trials of every point.", of_study="num_repeats")
    repeat_best: int | None = what(
        None,
        "Repeat the N leading points of a search with other seeds, as a study of its own.",
        "N",
        check=FlagCheck(lambda number: number >= 2, "must be at least 2", "the leader is compared with the next ones"),
        is_resumed=False,
        is_submitted=False,
        is_compared=False,
    )
    fresh: bool = what(False, "Run all trials again, even those with stored results.", is_resumed=False)
    retry_failed: bool = what(
        False, "Run trials of stopped points again even if their code has not changed.", is_resumed=False
    )
    seed: int | None = what(None, "Seed of everything random.", of_study="seed")
    num_profiled_steps: int = what(
        0, "Profile some steps of each point after its training.", word="--profile", given=NUM_PROFILED_STEPS
    )
    log_model: bool = what(False, "Log the best trial's model in MLflow (implies keep_model=true).", is_compared=False)
    log_all_models: bool = what(
        False, "Log every trial's model in MLflow, at its step (implies keep_model=true).", is_compared=False
    )
    system_metrics: bool = what(False, "Record the load of each trial's machines and GPUs.")
    part: str | None = what(
        None,
        "Run only every Nth block, here the Ith: one of N runs on machines of one kind, with one store.",
        "I/N",
        check=FlagCheck(StudyPart.is_one, "must be I/N, such as 2/4", "the second of four parts is 2/4"),
        is_resumed=False,
        is_compared=False,
    )
    dry_run: bool = what(False, "Only show the plan, like `raypar plan`.", is_resumed=False, is_submitted=False)
    no_ray: bool = where(False, "Run on this machine without Ray, one trial after another.", is_submitted=False)
    address: str | None = where(
        None,
        "Existing Ray cluster: auto or host:port; for study also http://host:port, a dashboard to submit to. "
        "(default: a local Ray)",
        "ADDRESS",
        is_compared=False,
    )
    data_dir: Path | None = where(  # noqa: RUF009
        None, "Folder of the data sets. (default: RAYPAR_DATA_DIR, else the user's cache)"
    )
    tracking_uri: str | None = where(
        None, "MLflow store. (default: MLFLOW_TRACKING_URI, else ./mlflow.db)", "URI", is_resumed=False
    )
    isolation: str = where(
        "warm",
        "warm: a gang runs trial after trial; fresh: a new gang for every trial.",
        check=FlagCheck(ISOLATIONS.__contains__, "unknown", f"one of {', '.join(ISOLATIONS)}"),
    )
    share_machine: bool = where(
        False,
        "Run beside other studies instead of waiting; marks the trials of both.",
        with_address="leave it out: it only concerns the cores of this machine",
    )
    exclusive: bool = where(
        False,
        "Nobody else uses the cluster: keep idle gangs, without CPUs in Ray.",
        is_compared=False,
        without_address="leave it out: nobody else uses a local Ray",
    )
    min_nodes: int | None = where(
        None,
        "Wait for this many Ray nodes, including the head. (default: those that `ray up` starts)",
        "N",
        check=FlagCheck(lambda number: number >= 1, "must be at least 1", "the head counts as a node"),
        is_compared=False,
        without_address="leave it out: a local Ray has one node",
    )
    until: str | None = stops(
        None, "Repeat open points until they are settled; --repeats is the minimum.", "settled", of_study="until"
    )
    budget: str | float | None = stops(
        None,
        "With --until: begin no repeats that would end later than this after the first trial began: 10m, 2h.",
        "TIME",
        of_study="budget",
        needs_until=True,
    )
    margin: str | float | None = stops(
        None,
        "With --until: differences below this don't matter. (default: 5%)",
        "SHARE",
        of_study="margin",
        needs_until=True,
    )
    max_repeats: int | None = stops(
        None, "With --until: maximum trials of a point. (default: 30)", "N", of_study="max_repeats", needs_until=True
    )
    trial_timeout: float | None = stops(
        None,
        "Time after which a trial counts as hung.",
        "SECONDS",
        check=FlagCheck(lambda limit_s: 0 < limit_s < math.inf, "must be greater than 0", "give it in seconds"),
    )

    def __post_init__(self) -> None:
        for each in all_flags():
            if (value := getattr(self, each.name)) is None or value is False:
                continue
            if each.without_address and not self.address:
                raise RayparError(f"{each.word} without --address", hint=each.without_address)
            if each.with_address and self.address:
                problem = f"{each.word} and --address {self.address} exclude each other"
                raise RayparError(problem, hint=each.with_address)
            if each.check is not None and not each.check.holds(value):
                shown = f"{value:g}" if isinstance(value, float) else value
                raise RayparError(f"{each.word} {shown}: {each.check.problem}", hint=each.check.hint)

    @property
    def keeps_models(self) -> str:
        """The flag for which each trial has to keep its model; empty: none."""
        return "--log-model" if self.log_model else "--log-all-models" if self.log_all_models else ""

    @property
    def of_study(self) -> tuple[FieldFlag, ...]:
        """The flags that change a field of the study, for `raypar.study.loader.load_study`."""
        from raypar.study.overrides import FieldFlag

        return tuple(
            FieldFlag(each.of_study, each.word, getattr(self, each.name), each.needs_until)
            for each in all_flags()
            if each.of_study
        )


@cache
def all_flags() -> tuple[Flag, ...]:
    """Return the run flags, in the order of ``raypar study --help``."""
    types = get_type_hints(RunFlags)
    made = ((each, each.metadata["flag"], f"--{each.name.replace('_', '-')}") for each in fields(RunFlags))
    return tuple(
        replace(flag, name=each.name, type=types[each.name], default=each.default, word=flag.word or word)
        for each, flag, word in made
    )
