"""Settings of a script that raypar can change from outside, as hyperparameters of studies of commands and train loops.

Unless a study sets one, the script's own value stays. `raypar.observe.settings` applies them.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Collection, Mapping

from raypar.errors import suggest
from raypar.study.space import Value
from raypar.study.workload import Config, Option, one_of, whole_number

WHAT_IF, CHANGE = "what_if", "change"
UNCHANGED = "none"
NO_LOADING, NO_COMMUNICATION = "no loading", "no communication"
NO_EVALUATION, NO_CHECKPOINTS = "no evaluation", "no checkpoints"
# Values of `WHAT_IF`, and when there is nothing to leave out.
COUNTERFACTUALS: Mapping[str, str] = {
    NO_LOADING: "no DataLoader has a length, or is iterated over twice",
    NO_COMMUNICATION: "no model is a DistributedDataParallel",
    NO_EVALUATION: "no evaluation was recognised",
    NO_CHECKPOINTS: "torch.save wrote no second file of a kind",
}


def _change_problem(value: Value) -> str | None:
    try:
        settings = settings_of(str(value))
    except ValueError as error:
        return str(error)
    possible = [key for key in SCRIPT_SETTINGS if key not in (WHAT_IF, CHANGE)]
    for key, each in settings.items():
        if key not in possible:
            return f"has an unknown setting {key!r}, {suggest(key, possible)}"
        if problem := _problem(SCRIPT_SETTINGS[key], each):
            return f"sets {key} to {each!r}: {problem}"
    return None


def _problem(option: Option, value: Value) -> str | None:
    """Return what is wrong with a setting's value, or None."""
    if option.kind is bool:
        return None if isinstance(value, bool) else "must be True or False"
    if not isinstance(value, int) or isinstance(value, bool):
        return "must be a whole number"
    return option.check(value)


def settings_of(change: str) -> dict[str, Value]:
    """Return the settings in a text: ``loader_workers=2 persistent_workers=True``. Raises ValueError."""
    if change == UNCHANGED:
        return {}
    settings: dict[str, Value] = {}
    for word in change.split():
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise ValueError(f"needs key=value, not {word!r}")
        if key in settings:
            raise ValueError(f"sets {key} twice")
        settings[key] = literal_eval(text) if text in ("True", "False") or text.isdecimal() else text
    if not settings:
        raise ValueError(f"is empty; write {UNCHANGED!r} to change nothing")
    return settings


def text_of(settings: Mapping[str, Value]) -> str:
    """Return settings as `settings_of` reads them."""
    return " ".join(f"{key}={value}" for key, value in settings.items()) or UNCHANGED


def _switch(doc: str) -> Option:
    return Option(None, bool, f"{doc}; None: as in the script", optional=True)


SCRIPT_SETTINGS: Mapping[str, Option] = {
    "loader_workers": whole_number(None, "num_workers of every DataLoader; None: as in the script", at_least=0),
    "pin_memory": _switch("pin_memory of every DataLoader"),
    "persistent_workers": _switch("persistent_workers of every DataLoader with processes"),
    "prefetch_factor": whole_number(None, "prefetch_factor of every DataLoader with processes; None: as in the script"),
    "evaluation_batches": whole_number(None, "batches of each evaluation; None: as in the script"),
    "compile": _switch("torch.compile the outermost module"),
    "channels_last": _switch("outermost module and its images as NHWC in memory"),
    "fused_optimizer": _switch("fused kernels of the optimizer"),
    "cudnn_benchmark": _switch("torch.backends.cudnn.benchmark"),
    "tf32": _switch("TF32 for products and convolutions of float32 on NVIDIA GPUs"),
    "expandable_segments": _switch("expandable_segments of the allocator on NVIDIA GPUs"),
    "threads": whole_number(None, "torch.set_num_threads, whatever the script calls; None: as in the script"),
    "bucket_cap_mb": whole_number(None, "bucket_cap_mb of DistributedDataParallel; None: as in the script"),
    "gradient_as_bucket_view": _switch("gradient_as_bucket_view of DistributedDataParallel"),
    "static_graph": _switch("static_graph of DistributedDataParallel"),
    WHAT_IF: one_of(
        UNCHANGED,
        (UNCHANGED, *COUNTERFACTUALS),
        "leave out a part of the work, to see what it costs: each loader's first batch again and again, gradients "
        "that stay on their rank, evaluations of one batch, or a single checkpoint of each kind",
    ),
    CHANGE: Option(
        UNCHANGED,
        str,
        'several of these settings in one value, such as "loader_workers=2 persistent_workers=True"',
        _change_problem,
    ),
}


def script_settings(config: Config, names: Collection[str] = ()) -> dict[str, Value]:
    """Return the settings in a trial's config.

    Args:
        names: of the script's own hyperparameters, which have another meaning.
    """
    given = {key: config[key] for key in SCRIPT_SETTINGS if key in config and key not in names}
    settings = settings_of(str(given.pop(CHANGE, UNCHANGED)))
    return settings | {key: v for key, v in given.items() if v is not None and v != SCRIPT_SETTINGS[key].default}


def leaves_out_nothing(chosen: Mapping[str, Value]) -> bool:
    """Return whether a point leaves out the communication of a single worker, which has none."""
    return chosen.get(WHAT_IF) == NO_COMMUNICATION and chosen.get("num_workers", 1) == 1


def is_counterfactual(values: Mapping[str, Value]) -> bool:
    """Return whether trials leave out a part of the work, so that their metrics mean nothing.

    Args:
        values: hyperparameters of the trials.
    """
    return values.get(WHAT_IF) in tuple(COUNTERFACTUALS)  # a tuple, because a value may have no hash
