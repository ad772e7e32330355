"""Study files that are written for a script, ready to run and meant to be edited."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.study.command import PLACES
from raypar.study.options import LOOP_OPTIONS
from raypar.study.script import (
    BATCH_SIZE,
    EPOCHS,
    LEARNING_RATE,
    STEPS,
    Script,
    ScriptKind,
    ScriptMetric,
    ScriptOption,
    guess,
    is_better_larger,
)
from raypar.units import listed

MAX_COLUMNS = 110
MAX_OTHERS = 12  # further options that a comment lists
SWEPT = (BATCH_SIZE, LEARNING_RATE, EPOCHS, STEPS)  # the first that a script has, unless workers are swept
OUTPUT = re.compile(r"(.*_)?(out|output|save|log|logs|root|work|checkpoints?)(_?(dir|directory|folder|path))?")
CHOOSER = "raypar init"
NO_VALUE = "the script has no default: fill it in"
GUESSED = "guessed, as the script has no default: check it"


@dataclass(frozen=True)
class Draft:
    """Text of a study file.

    Attributes:
        swept: ``num_workers 1, 2``.
        open_options: options that are to be filled in before it runs.
        metric: the metric that its trials are judged by; empty: the script shows none.
    """

    text: str
    swept: str
    open_options: tuple[str, ...] = ()
    metric: str = ""


@dataclass(frozen=True)
class _Entry:
    """Line of a dict in the file."""

    key: str
    value: Any
    comment: str = ""


def draft_of(script: Script, output: Path) -> Draft:
    """Return a study of a script.

    Args:
        output: the study file, in whose folder the script's path starts.
    """
    if script.kind is ScriptKind.TRAIN_LOOP:
        return _of_loop(script)
    if script.kind is ScriptKind.MODEL:
        return _of_model(script)
    return _of_command(script, os.path.relpath(script.path.resolve(), output.resolve().parent))


def starter() -> Draft:
    """Return a study of a network that ships with raypar, with data of its own."""
    return Draft(STARTER, "batch_size 96, 768; num_workers 1, 2", metric="accuracy")


# ---- commands


def _of_command(script: Script, path: str) -> Draft:
    chosen = _passed(script)
    runs_workers = script.kind in (ScriptKind.TORCHRUN, ScriptKind.HUGGING_FACE) or script.parser == "LightningCLI"
    words = [path if re.fullmatch(r"[\w./-]+", path) else shlex.quote(path).replace("{", "{{").replace("}", "}}")]
    if script.kind in (ScriptKind.TORCHRUN, ScriptKind.HUGGING_FACE):
        words = ["torchrun --standalone --nproc-per-node={num_workers}", *words]
    else:
        words = ["python", *words]
    if script.subcommand:
        words.append(script.subcommand)
    if script.needs_do_train:
        words.append("--do_train")
    entries: list[_Entry] = []
    tensorboard, metrics = "", script.metrics
    if script.parser == "LightningCLI":
        words += ["--trainer.devices={num_workers} --trainer.accelerator={device}"]
        words += ["--trainer.default_root_dir={output_dir}"]
        tensorboard = "{output_dir}"  # Lightning's logger writes there, if tensorboard is installed
    for option, place in chosen:
        words.append(f"{option.flag} {{{place}}}".strip())
        if place not in PLACES and place not in LOOP_OPTIONS:
            entries.append(_entry(option, place))
    if script.event_option:
        tensorboard = "{output_dir}"
    space, entries = _space(entries, runs_workers)
    names = [m.name for m in metrics]
    metric = "train_loss" if script.kind is ScriptKind.HUGGING_FACE else _judged_by(names)
    parts = [
        HEAD,
        "from raypar import Study, Workload, grid\n",
        "workload = Workload.from_command(",
        "    # It is run in the folder of this file; what is in braces comes from `config` and `space` below.",
        *_text_lines(words),
        *_metrics_lines(metrics, script.epoch_pattern, tensorboard),
    ]
    if tensorboard:
        parts.append(f'    tensorboard="{tensorboard}",  # its event files are read when it has ended')
        if not metric:
            parts.append('    # metric="train_loss",  # one of their tags, that its points are judged by')
    parts += [*_metric_lines(metric), ")\n", *_study_lines(space, entries), *_others(script)]
    if script.kind is ScriptKind.PLAIN:
        parts.append('# It runs on one core unless you give it more: config={..., "cpus_per_worker": 4}.')
    elif script.kind is ScriptKind.TORCHRUN:
        parts.append("# If its batch size is that of one worker, two workers train on twice as many samples a step.")
    return _draft(parts, space, entries, metric)


def _passed(script: Script) -> list[tuple[ScriptOption, str]]:
    """Return the options that the command line gives, each with its name in braces; positional ones come first."""
    chosen = []
    for option in script.options:
        is_swept = any(p.fullmatch(option.name.lower()) for p in SWEPT) and option.kind in (int, float)
        is_given = is_swept and option.default is not None and option.default > 0
        if option.is_switch:
            continue
        is_output = option.is_required and option.kind is str and OUTPUT.fullmatch(option.name.lower())
        if option.flag == script.event_option != "" or option.name == "output_dir" or is_output:
            chosen.append((option, "output_dir"))
        elif option.name == "seed" and option.kind is int:
            chosen.append((option, "seed"))
        elif option.name == "device" and _takes_devices(option):
            chosen.append((option, "device"))
        elif option.is_required or is_given:
            taken = option.name in PLACES or option.name in LOOP_OPTIONS
            chosen.append((option, f"script_{option.name}" if taken else option.name))
    return sorted(chosen, key=lambda pair: bool(pair[0].flag))


def _takes_devices(option: ScriptOption) -> bool:
    is_usual = option.default in (None, "cpu", "cuda", "cuda:0", "auto")
    return is_usual and (not option.choices or {"cpu", "cuda"} <= set(option.choices))


def _entry(option: ScriptOption, key: str) -> _Entry:
    if option.default is not None:
        return _Entry(key, option.default)
    value = guess(option)
    return _Entry(key, value, NO_VALUE if value is None else GUESSED)


def _space(entries: Sequence[_Entry], runs_workers: bool) -> tuple[list[tuple[str, tuple[Any, ...]]], list[_Entry]]:
    """Return the swept values, the script's own first, and the entries that are fixed."""
    if runs_workers:
        return [("num_workers", (1, 2))], list(entries)
    for pattern in SWEPT:
        for entry in entries:
            is_number = type(entry.value) in (int, float) and entry.value > 0
            if is_number and pattern.fullmatch(entry.key.lower()):
                other = float(f"{entry.value / 10:.6g}") if pattern is LEARNING_RATE else entry.value * 2
                return [(entry.key, (entry.value, other))], [e for e in entries if e is not entry]
    return [("cpus_per_worker", (1, 2))], list(entries)


def _text_lines(words: Sequence[str]) -> list[str]:
    """Return a command line as an argument, in one line or several."""
    text = " ".join(words)
    if len(text) < MAX_COLUMNS - 8:
        return [f"    {_quoted(text)},"]
    lines: list[str] = []
    line = ""
    for word in words:
        if line and len(line) + len(word) > MAX_COLUMNS - 12:
            lines.append(line)
            line = ""
        line += f" {word}" if line or lines else word
    return [*(f"    {_quoted(part)}" for part in lines), f"    {_quoted(line)},"]


def _metrics_lines(metrics: Sequence[ScriptMetric], epoch_pattern: str, tensorboard: str) -> list[str]:
    patterns = [metric for metric in metrics if metric.pattern]
    if tensorboard and not patterns:
        return []
    if not metrics:
        return [
            '    # No metric was seen in what it prints. Let it print JSON lines, {"loss": 0.5}, or call',
            '    # raypar.report({"loss": loss}) and, after each step, raypar.step(); or name a regular expression:',
            '    # metrics={"loss": r"loss: ([0-9.]+)"},',
        ]
    if not patterns:
        numbers = ", ".join(dict.fromkeys(str(metric.line) for metric in metrics))
        return [f"    # Its metrics are read where it reports them, line {numbers}."]
    lines = ["    metrics={  # looked for in each line that it prints; the group is the value"]
    lines += [
        f"        {_quoted(m.name)}: r{_quoted_raw(m.pattern)},{f'  # line {m.line}' if m.line else ''}"
        for m in patterns
    ]
    if epoch_pattern:  # which times the epochs, where each is reported once
        lines.append(f'        "epoch": r{_quoted_raw(epoch_pattern)},  # holds for the lines after it')
    return [*lines, "    },"]


def _others(script: Script) -> list[str]:
    given = {option.name for option, _ in _passed(script)}
    others = [option for option in script.options if option.name not in given and option.flag]
    if not others:
        return []
    texts = [
        option.flag if option.is_switch or option.default is None else f"{option.flag} {option.default}"
        for option in others
    ]
    text = f"Left at their defaults: {listed(texts, MAX_OTHERS)}. To set or sweep one, add it to the command: "
    example = next((o for o in others if not o.is_switch), None)
    text += f"{example.flag} {{{example.name}}}." if example else "a flag."
    return [f"# {line}" for line in textwrap.wrap(text, MAX_COLUMNS - 2, break_on_hyphens=False)]


# ---- train loops and models


def _of_loop(script: Script) -> Draft:
    entries = [_entry(option, option.name) for option in script.options if option.name not in LOOP_OPTIONS]
    metric = _judged_by([m.name for m in script.metrics])
    space: list[tuple[str, tuple[Any, ...]]] = [("num_workers", (1, 2))]
    module, loop = script.path.stem, script.train_loop
    if module.isidentifier():
        imports = f"from {module} import {loop}\n\nfrom raypar import Study, Workload, grid\n"
    else:
        imports = "from importlib import import_module\n\nfrom raypar import Study, Workload, grid\n"
        loop = f'import_module("{module}").{loop}'
    parts = [
        HEAD,
        imports,
        "workload = Workload.from_train_loop(",
        f"    {loop},  # unchanged; each step is timed if it calls raypar.step() after each,",
        "    # else what lies between two of its reports that have an epoch or a step.",
        *_metric_lines(metric),
        ")\n",
        *_study_lines(space, entries),
        "# If its batch size is that of one worker, two workers train on twice as many samples a step.",
    ]
    return _draft(parts, space, entries, metric)


def _of_model(script: Script) -> Draft:
    model = script.model
    assert model is not None
    options = [_entry(option, option.name) for option in model.options]
    module, name = script.path.stem, model.name
    code = [
        f"    from {module} import {name}\n" if module.isidentifier() else "    from importlib import import_module\n"
    ]
    called = name if module.isidentifier() else f'import_module("{module}").{name}'
    arguments = [f'{entry.key}=config["{entry.key}"]' for entry in options]
    text = f"    return {called}({', '.join(arguments)})"
    if len(text) > MAX_COLUMNS:
        text = "\n".join([f"    return {called}(", *(f"        {argument}," for argument in arguments), "    )"])
    code.append(text)
    shape = model.sample_shape or (32,)
    guessed = "guessed from its first layer" if model.sample_shape else "of one sample: fill it in"
    space: list[tuple[str, tuple[Any, ...]]] = [("num_workers", (1, 2))]
    inputs = "torch.randn(NUM_SAMPLES, *SHAPE)"
    if model.num_tokens:
        inputs = f"torch.randint({model.num_tokens}, (NUM_SAMPLES, *SHAPE))"
    if model.is_regression:
        targets = ["    targets = torch.randn(NUM_SAMPLES, 1)"]
        losses: list[str] = [
            "def loss(outputs, targets):",
            "    return (outputs - targets).square().mean()\n\n",
            "def error(outputs, targets):",
            "    return (outputs - targets).abs().flatten(1).mean(1)  # of each sample\n\n",
        ]
        more = ["    loss=loss,", '    metrics={"error": error},', *_metric_lines("error")[:2]]
    else:
        targets = [
            "    num_classes = model(config)(inputs[:2]).shape[1]",
            "    targets = torch.randint(num_classes, (NUM_SAMPLES,))",
        ]
        losses, more = [], ["    # loss=…, metrics=…: cross-entropy and accuracy unless you give others."]
    entries = [_Entry("epochs", 5), _Entry("batch_size", 64, "of all workers together"), _Entry("lr", 0.01)]
    parts = [
        HEAD,
        "from raypar import Data, Split, Study, Workload, grid\n",
        f"SHAPE = {shape!r}  # {guessed}",
        "NUM_SAMPLES = 2048\n\n",
        "def model(config):",
        *code,
        "\n",
        "def data(config):",
        "    # Random samples, so that it runs at once and shows times: put your own here.",
        "    import torch\n",
        f"    inputs = {inputs}",
        *targets,
        "    return Data(train=Split(inputs[256:], targets[256:]), val=Split(inputs[:256], targets[:256]))\n\n",
        *losses,
        "workload = Workload(",
        f"    name={_quoted(name)},",
        "    model=model,",
        "    data=data,",
        *more,
        *(_dict_lines("options", options) if options else ()),
        ")\n",
        *_study_lines(space, entries),
        "# raypar's own hyperparameters, such as optimizer, precision and strategy, go into config or space too.",
    ]
    return _draft(parts, space, [*options, *entries], "error" if model.is_regression else "accuracy")


# ---- parts of the file


HEAD = """\
# A first draft by `raypar init`, to be edited. The report's question follows from what is swept; a docstring here would
# replace it.
"""


def _study_lines(space: Sequence[tuple[str, tuple[Any, ...]]], entries: Sequence[_Entry]) -> list[str]:
    key, values = space[0]
    swept = f"{_quoted(key)}: grid({', '.join(map(repr, values))})"
    lines = [
        "study = Study(",
        "    workload=workload,",
        f"    space={{{swept}}},  # all values are run; several keys make a grid",
        f"    baseline={{{_quoted(key)}: {values[0]!r}}},  # speedups are against this",
        "    num_repeats=3,  # an interval needs repeats",
    ]
    return [*lines, *(_dict_lines("config", entries) if entries else ()), ")"]


def _dict_lines(name: str, entries: Sequence[_Entry]) -> list[str]:
    lines = [
        f"        {_quoted(entry.key)}: {_shown(entry.value)},{f'  # {entry.comment}' if entry.comment else ''}"
        for entry in entries
    ]
    return [f"    {name}={{", *lines, "    },"]


def _metric_lines(metric: str) -> list[str]:
    if not metric:
        return []
    return [
        f"    metric={_quoted(metric)},  # that its points are judged by",
        f'    mode="{"max" if is_better_larger(metric) else "min"}",',
        f'    metric_chosen_by="{CHOOSER}",  # delete this line if that is your choice too',
    ]


def _judged_by(names: Sequence[str]) -> str:
    """Return the metric to judge points by: one of held-out data first, and an accuracy before a loss."""
    return max(names, key=_rank, default="")


def _rank(name: str) -> tuple[bool, bool]:
    return bool(re.search("test|val|eval", name)), is_better_larger(name)


def _draft(
    parts: Sequence[str], space: Sequence[tuple[str, tuple[Any, ...]]], entries: Sequence[_Entry], metric: str
) -> Draft:
    swept = "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in space)
    missing = tuple(entry.key for entry in entries if entry.comment == NO_VALUE)
    return Draft("\n".join(parts) + "\n", swept, missing, metric)


def _shown(value: Any) -> str:
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """Return a string literal in double quotes, where that needs no escapes."""
    return repr(text) if '"' in text or repr(text)[1:-1] != text else f'"{text}"'


def _quoted_raw(pattern: str) -> str:
    if '"' not in pattern:
        return f'"{pattern}"'
    return f"'{pattern}'" if "'" not in pattern else f'"""{pattern}"""'


STARTER = '''"""Does a second worker pay off? A small network on 8x8 digits, with a small and a large batch.

A first draft by `raypar init`, to be edited. Nothing is downloaded.
"""

from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,  # `raypar model list` lists those that ship; for your own: raypar init SCRIPT
    # All values of a grid are run, and several keys make a grid: four points here.
    space={"batch_size": grid(96, 768), "num_workers": grid(1, 2)},
    baseline={"num_workers": 1},  # speedups are against the point that differs only in this
    num_repeats=3,  # an interval needs repeats; until="settled" repeats what is still open
    config={
        "epochs": 15,
        "lr": 0.1,
        "device": "auto",  # "cpu", "cuda", or GPUs where every trial fits
    },
)
'''
