"""Drafts of study files for scripts, ready to run and to be edited."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raypar.init.script import Script, ScriptKind, ScriptOption
from raypar.study.command import PLACES
from raypar.study.metric import direction_of
from raypar.study.space import Value
from raypar.study.workload import PLACEMENT_OPTIONS
from raypar.units import listed

MAX_COLUMNS = 110
MAX_OTHERS = 12  # options listed in a comment
LEARNING_RATE = re.compile(r"(.*_)?(lr|learning_rate)")
# Options to sweep, in order of preference, with the value for an option without a default.
SWEPT = {
    re.compile(r"(?!.*(test|val|eval))(.*_)?(batch_?size|bs|bsz)(_per_\w+)?"): 32,
    LEARNING_RATE: 0.01,
    re.compile(r"(num_|n_|max_|total_|nb_)?(train_|training_)?epochs?"): 2,
    re.compile(r"(num_|n_|max_|total_)(train_|training_)?(steps|iters|iterations)|iters|iterations"): 100,
}
OUTPUT = re.compile(r"(.*_)?(out|output|save|log|logs|root|work|checkpoints?)(_?(dir|directory|folder|path))?")
NO_VALUE = "no default in the script: fill it in"
GUESSED = "guessed, no default in the script: check it"


@dataclass(frozen=True)
class Draft:
    """Text of a study file.

    Attributes:
        swept: ``num_workers 1, 2``.
        open_options: options that have to be filled in before it can run.
        metric: the metric that trials are judged by; empty: none found in the script.
    """

    text: str
    swept: str
    open_options: tuple[str, ...] = ()
    metric: str = ""


def starter() -> Draft:
    """Return a study of a network and data that ship with raypar."""
    return Draft(STARTER, "batch_size 96, 768; num_workers 1, 2", metric="accuracy")


@dataclass(frozen=True)
class SweptSpace:
    """Question of a command line, instead of one that is drafted.

    Attributes:
        space: hyperparameters to their values; one with a single value is fixed. None: what is likely of interest.
        baseline: hyperparameters of the baseline; empty: the first value of ``num_workers``, or of each hyperparameter.
        name: the study's; empty: that of its file.
    """

    space: Mapping[str, tuple[Value, ...]] | None = None
    baseline: Mapping[str, Value] = field(default_factory=dict)
    name: str = ""


AS_DRAFTED = SweptSpace()


def draft_of_command(command: str, script: Script | None, asked: SweptSpace, folder: str = ".") -> Draft:
    """Return a study of a command line.

    Args:
        script: the training script in it, whose printed metrics are read; None: unknown.
        folder: where it runs, relative to the study file's folder.
    """
    # Stored trials are found by the workload's name, so another command needs another name.
    lines = [f"{_literal(command)},", f"name={_literal(command)},"]
    if folder != ".":
        lines.append(f"folder={_literal(folder)},")
    metric = ""
    if script is not None:
        lines += _metric_lines(script)
        metric = _judged_by(script)
        lines += _metric_choice(metric)
    return Draft(_text("from_command", "", lines, {}, [], asked.space or {}, asked), "", metric=metric)


def takes_workers(script: Script) -> bool:
    """Return whether a script can be started with several workers, as far as its code shows."""
    return script.kind not in (ScriptKind.PLAIN, ScriptKind.LIGHTNING) or script.parser == "LightningCLI"


def name_in_study(option: ScriptOption) -> str:
    """Return the name of a script's option in a study, where some names are raypar's own."""
    is_taken = option.name in PLACES or option.name in PLACEMENT_OPTIONS
    return f"script_{option.name}" if is_taken else option.name


def draft_of(script: Script, output: Path, asked: SweptSpace = AS_DRAFTED) -> Draft:
    """Return a study of a script.

    Args:
        output: the study file; the script's path is relative to its folder.
    """
    if script.kind is ScriptKind.TRAIN_LOOP:
        given = [(option, option.name) for option in script.options if option.name not in PLACEMENT_OPTIONS]
        module, loop = script.path.stem, script.train_loop
        imports = f"from {module} import {loop}\n\n"
        if not module.isidentifier():
            imports, loop = "from importlib import import_module\n\n", f"import_module({_literal(module)}).{loop}"
        lines = [f"{loop},  # unchanged; raypar observes its steps"]
    else:
        given, imports = _given(script.options, asked.space or ()), ""
        lines = _command_lines(script, os.path.relpath(script.path.resolve(), output.resolve().parent), given)
    config = {key: _value(option) for option, key in given if key not in PLACES and key not in PLACEMENT_OPTIONS}
    space = asked.space
    if space is None:
        space = dict([("num_workers", (1, 2)) if takes_workers(script) else _swept(config)])
    metric = _judged_by(script)
    lines += _metric_choice(metric)
    maker = "from_train_loop" if imports else "from_command"
    text = _text(maker, imports, lines, config, _notes(script, given, space), space, asked)
    missing = tuple(key for key, (value, _) in config.items() if value is None and key not in space)
    return Draft(text, "; ".join(f"{key} {', '.join(map(str, each))}" for key, each in space.items()), missing, metric)


def _text(
    maker: str,
    imports: str,
    lines: Sequence[str],
    config: Mapping[str, tuple[Any, str]],
    notes: Sequence[str],
    space: Mapping[str, tuple[Value, ...]],
    asked: SweptSpace,
) -> str:
    """Return the text of a study file."""
    fixed = {key: (values[0], "") for key, values in space.items() if len(values) == 1}
    swept = {key: values for key, values in space.items() if len(values) > 1}
    config = {key: each for key, each in config.items() if key not in space} | fixed
    entries = [f"        {_literal(k)}: {_literal(v)},  {comment}".rstrip() for k, (v, comment) in config.items()]
    first = {key: values[0] for key, values in swept.items()}
    baseline = asked.baseline or ({"num_workers": first["num_workers"]} if "num_workers" in first else first)
    grids = ", ".join(f"{_literal(k)}: grid({', '.join(map(_literal, values))})" for k, values in swept.items())
    return TEMPLATE.format(
        imports=imports,
        maker=maker,
        arguments=textwrap.indent("\n".join(lines), "    "),
        name=f"    name={_literal(asked.name)},\n" if asked.name else "",
        space=grids,
        baseline=", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in baseline.items()),
        config="\n".join(["    config={", *entries, "    },\n"]) if entries else "",
        notes="".join(f"# {line.rstrip()}\n" for note in notes for line in _wrapped(" ".join(note.split()))),
    )


def _judged_by(script: Script) -> str:
    """Return the metric to judge points by; empty: none was found."""
    if script.kind is ScriptKind.HUGGING_FACE:  # evaluates only if asked to
        return "train_loss"
    return max((m.name for m in script.metrics), key=_rank, default="")


def _metric_choice(metric: str) -> list[str]:
    if not metric:
        return []
    return [
        f"metric={_literal(metric)},  # by which points are judged",
        f'mode="{"max" if _rank(metric)[1] else "min"}",',
        'metric_chosen_by="raypar init",  # delete this line once you have checked the metric',
    ]


def _given(options: Iterable[ScriptOption], asked: Collection[str]) -> list[tuple[ScriptOption, str]]:
    """Return the options set on the command line with their names in braces, positional ones first.

    Args:
        asked: options to set in any case.
    """
    given = []
    for option in options:
        name, default = option.name.lower(), option.default
        has_devices = not option.choices or {"cpu", "cuda"} <= set(option.choices)
        is_swept = any(p.fullmatch(name) for p in SWEPT) and type(default) in (int, float) and default > 0
        if name == "output_dir" or (option.is_required and option.kind is str and OUTPUT.fullmatch(name)):
            given.append((option, "output_dir"))
        elif name == "seed" and option.kind is int:
            given.append((option, "seed"))
        elif name == "device" and has_devices and default in (None, "cpu", "cuda", "cuda:0", "auto"):
            given.append((option, "device"))
        elif option.is_required or is_swept or name_in_study(option) in asked:
            given.append((option, name_in_study(option)))
    return sorted(given, key=lambda pair: bool(pair[0].flag))


def _value(option: ScriptOption) -> tuple[Any, str]:
    """Return an option's value in the study, and a comment."""
    if option.default is not None:
        return option.default, ""
    likely = next((value for pattern, value in SWEPT.items() if pattern.fullmatch(option.name.lower())), None)
    value = option.choices[0] if option.choices else likely
    return value, f"# {NO_VALUE if value is None else GUESSED}"


def _swept(config: Mapping[str, tuple[Any, str]]) -> tuple[str, tuple[Any, ...]]:
    """Return the option to sweep of a single-process script, and its values, the script's first."""
    for pattern in SWEPT:
        for key, (value, _) in config.items():
            if pattern.fullmatch(key.lower()) and type(value) in (int, float) and value > 0:
                return key, (value, float(f"{value / 10:.6g}") if pattern is LEARNING_RATE else value * 2)
    return "cpus_per_worker", (1, 2)


def _rank(metric: str) -> tuple[bool, bool]:
    """Return the rank of a metric to judge points by: held-out data first, then metrics to maximise."""
    return bool(re.search("test|val", metric)), direction_of(metric) == "max"


def _command_lines(script: Script, path: str, given: Sequence[tuple[ScriptOption, str]]) -> list[str]:
    """Return the arguments of ``Workload.from_command``: the command line, and how to find its metrics."""
    with_torchrun = script.kind in (ScriptKind.TORCHRUN, ScriptKind.HUGGING_FACE)
    words = ["torchrun --standalone --nproc-per-node={num_workers}" if with_torchrun else "python"]
    words += [shlex.quote(path).replace("{", "{{").replace("}", "}}"), *script.subcommand.split()]
    if script.parser == "LightningCLI":
        words += ["--trainer.devices={num_workers} --trainer.accelerator={device}"]
        words += ["--trainer.default_root_dir={output_dir}"]
    words += [option.with_value(f"{{{name}}}") for option, name in given]
    lines = ["# Runs in the folder of this file. Names in braces come from `config` and `space` below."]
    parts = _wrapped(" ".join(word.replace(" ", "\0") for word in words))  # keep a flag and its value on one line
    lines += [_literal(part.replace("\0", " ")) for part in parts]
    lines[-1] += ","
    return lines + _metric_lines(script)


def _metric_lines(script: Script) -> list[str]:
    """Return the arguments by which the script's metrics are found."""
    lines: list[str] = []
    patterns = {metric.name: (metric.pattern, metric.line) for metric in script.metrics if metric.pattern}
    has_events = script.parser == "LightningCLI"
    if has_events:
        lines.append('tensorboard="{output_dir}",  # its event files are read at the end')
    if patterns:
        lines.append("metrics={  # searched for in each printed line; the group is the value")
        lines += [
            f"    {_literal(name)}: {_raw(p)},{f'  # line {line}' * bool(line)}" for name, (p, line) in patterns.items()
        ]
        if script.epoch_pattern:  # times the epochs, if each is reported once
            lines.append(f'    "epoch": {_raw(script.epoch_pattern)},  # applies to the lines after it')
        lines.append("},")
    elif script.metrics and not has_events:
        numbers = dict.fromkeys(str(metric.line) for metric in script.metrics)
        lines.append(f"# Its metrics come from its reports, line {', '.join(numbers)}.")
    elif not script.metrics:
        lines += NO_METRICS
    return lines


def _notes(script: Script, given: Sequence[tuple[ScriptOption, str]], space: Collection[str]) -> list[str]:
    """Return the comments below the study."""
    names = {option.name for option, _ in given}
    others = [option for option in script.options if option.name not in names and option.flag]
    notes = []
    if others:
        shown = [o.flag.rstrip("=") if o.default is None else f"{o.flag} {o.default}" for o in others]
        example = next((o for o in others if not o.is_switch), others[0])
        added = example.with_value("" if example.is_switch else f"{{{example.name}}}")
        notes.append(
            f"At their defaults: {listed(shown, MAX_OTHERS)}. To set or sweep one, add it to the command: {added}."
        )
    notes += [f"{note[0].upper()}{note[1:]}." for note in script.notes]
    if script.kind is ScriptKind.PLAIN and "cpus_per_worker" not in space:
        notes.append('It runs on one core. To use more: config={..., "cpus_per_worker": 4}.')
    elif script.kind in (ScriptKind.TORCHRUN, ScriptKind.TRAIN_LOOP):
        notes.append("If its batch size is per worker, two workers train on twice as many samples per step.")
    return notes


def _wrapped(text: str) -> list[str]:
    """Split the text into lines that join to the text."""
    as_it_is: Any = {"drop_whitespace": False, "replace_whitespace": False, "expand_tabs": False}
    return textwrap.wrap(text, MAX_COLUMNS - 10, break_long_words=False, break_on_hyphens=False, **as_it_is)


def _literal(value: Any) -> str:
    """Return a value's literal; strings in double quotes if that needs no escapes."""
    return f'"{value}"' if isinstance(value, str) and repr(value) == f"'{value}'" and '"' not in value else repr(value)


def _raw(pattern: str) -> str:
    return f'r"{pattern}"' if pattern.isprintable() and '"' not in pattern else repr(pattern)


NO_METRICS = """\
# No metric was found in its output. Let it print JSON lines, {"loss": 0.5}, or call
# raypar.report({"loss": loss}); or set a regular expression:
# metrics={"loss": r"loss: ([0-9.]+)"},""".splitlines()

TEMPLATE = """\
# A draft by `raypar init`, to be edited. The report's question follows from what is swept, unless you add a docstring.

{imports}from raypar import Study, Workload, grid

workload = Workload.{maker}(
{arguments}
)

study = Study(
    workload=workload,
{name}    space={{{space}}},  # all values are run; several keys form a grid
    baseline={{{baseline}}},  # speedups are relative to this
    num_repeats=3,  # an interval needs repeats
{config})
{notes}"""

STARTER = '''"""Does a second worker pay off? A small network on 8x8 digits, with a small and a large batch.

A draft by `raypar init`, to be edited. Nothing is downloaded.
"""

from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,  # `raypar model list` lists others; for your own: raypar init SCRIPT
    # All values are run, and several keys form a grid: four points here.
    space={"batch_size": grid(96, 768), "num_workers": grid(1, 2)},
    baseline={"num_workers": 1},  # speedups are relative to the point that differs only in this
    num_repeats=3,  # an interval needs repeats; until="settled" repeats inconclusive points
    config={
        "epochs": 15,
        "lr": 0.1,
        "device": "auto",  # "cpu", "cuda", or "auto": GPUs if every trial fits
    },
)
'''
