"""Training scripts: kind, options and printed metrics, read from their code without running it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any

from raypar.errors import RayparError
from raypar.study.loader import read_python, syntax_error
from raypar.study.metric import WORDS

NUMBER = r"([-+\d.,eE]*\d|[-+]?inf|nan)"
EPOCH = r"(?i)\bepoch\W{0,3}(\d+)"


class ScriptKind(StrEnum):
    """Kind of script, by how it is started."""

    TRAIN_LOOP = "Ray Train loop"
    HUGGING_FACE = "Hugging Face Trainer script"
    LIGHTNING = "Lightning script"
    TORCHRUN = "torchrun script"
    PLAIN = "script"


@dataclass(frozen=True)
class ScriptOption:
    """Option of a script's command line, or key of a train loop's config.

    Attributes:
        name: its identifier in a study.
        flag: ``--batch-size``, or with a ``=`` at the end ``training.lr=``; empty: positional.
        default: None: missing, or not visible in the script.
        kind: type of its values.
        choices: allowed values; empty: any.
        is_required: the script doesn't run without it.
        is_switch: it takes no value.
    """

    name: str
    flag: str = ""
    default: Any = None
    kind: type = str
    choices: tuple[Any, ...] = ()
    is_required: bool = False
    is_switch: bool = False

    def with_value(self, value: str) -> str:
        """Return the option with a value on a command line."""
        return f"{self.flag}{value}" if self.flag.endswith("=") else f"{self.flag} {value}".strip()


@dataclass(frozen=True)
class ScriptMetric:
    """Metric that a script prints or reports.

    Attributes:
        pattern: regular expression for a line of output, with the value as group. A percent sign is outside of the
            group. Empty: it is reported, in a JSON line, event files or MLflow.
        line: line of the script; 0: the Trainer prints it.
        sample: example of a printed line with invented numbers; empty without a pattern.
        value: the number that the pattern finds in the sample.
        is_mixed: the pattern also matches other printed lines.
    """

    name: str
    pattern: str
    line: int
    sample: str = ""
    value: str = ""
    is_mixed: bool = False


@dataclass(frozen=True)
class Script:
    """Result of reading a script.

    Attributes:
        evidence: name and line that show its kind.
        parser: package or class that reads its command line; empty: none found.
        subcommand: words that must come first on its command line.
        options: options of its command line, or keys of its train loop's config.
        metrics: metrics that it prints or reports.
        epoch_pattern: regular expression for the epoch number in its output; empty: it prints none.
        train_loop: name of its ``train_loop_per_worker``.
        notes: possible problems, one sentence each.
    """

    path: Path
    kind: ScriptKind
    evidence: str = ""
    parser: str = ""
    subcommand: str = ""
    options: tuple[ScriptOption, ...] = ()
    metrics: tuple[ScriptMetric, ...] = ()
    epoch_pattern: str = ""
    train_loop: str = ""
    notes: tuple[str, ...] = ()


def read_script(path: Path) -> Script:
    """Read a script.

    Raises:
        RayparError: the file is missing or not Python, it runs nothing, or it has a train loop but trains on import.
    """
    source = read_python(path, "script")
    try:
        code = _Code(ast.parse(source, str(path)))
        return _script_of_loop(path, code) or _script(path, code)
    except SyntaxError as error:
        raise syntax_error(path, error) from None
    except (ValueError, MemoryError, RecursionError) as error:  # null bytes; a thousand brackets
        raise RayparError(f"{path}: not Python: {error}", hint="check that it is a text file") from None


# ---- code

_MAX_DEPTH = 8  # of names assigned to names
_MAX_BASE, _MAX_EXPONENT = 1000, 64  # of powers that are evaluated
_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_PHASE_WORD = re.compile("train|training|val|valid|validation|test|eval|evaluation|dev", re.IGNORECASE)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b if b else None,
    ast.Pow: lambda a, b: a**b if abs(a) <= _MAX_BASE and abs(b) <= _MAX_EXPONENT and (a > 0 or b > 0) else None,
}


class _Code:
    """A script's code, with the possible values of its names.

    Attributes:
        scopes: scope of each node, in the order of the text: ``.main.evaluate``; empty: the module.
        sources: expressions that assignments, loops and calls give a name, by scope and name; None: unknown.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree, self.text = tree, ast.unparse(tree)
        self.scopes: dict[Any, str] = {}
        self.imports: dict[str, str] = {}
        self.sources: dict[tuple[str, str], list[ast.expr | None]] = defaultdict(list)
        pending: list[tuple[ast.AST, str]] = [(tree, "")]
        while pending:
            node, scope = pending.pop()
            self.scopes[node] = scope
            if isinstance(node, ast.Import):
                for name, alias in ((alias.name, alias.asname) for alias in node.names):
                    self.imports[alias or name.split(".")[0]] = name if alias else name.split(".")[0]
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {a.asname or a.name: f"{node.module or ''}.{a.name}" for a in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        self.sources[scope, target.id].append(node.value)
            inner = f"{scope}.{node.name}" if isinstance(node, _DEFINITIONS) else scope
            pending += [(child, inner) for child in reversed(list(ast.iter_child_nodes(node)))]
        self.calls = [node for node in self.scopes if isinstance(node, ast.Call)]
        self.calls_by_name: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            self.calls_by_name[self.dotted(call.func).rpartition(".")[2]].append(call)
        for node, scope in self.scopes.items():
            if isinstance(node, ast.For):
                targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
                for at, target in enumerate(targets):
                    if isinstance(target, ast.Name):
                        self.sources[scope, target.id] += self._elements(node.iter, at, len(targets))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._add_parameters(node, f"{scope}.{node.name}")

    def _elements(self, node: ast.expr | None, at: int, num: int) -> list[ast.expr | None]:
        """Return the values of loop target `at` of `num` in a loop over a list or tuple."""
        elements = getattr(self.source(node), "elts", [])
        parts = [each.elts if num > 1 and isinstance(each, (ast.List, ast.Tuple)) else [each] for each in elements]
        return [part[at] for part in parts if len(part) == num]

    def _add_parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef, scope: str) -> None:
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        for call in self.calls_of(function.name):
            is_method = names[:1] == ["self"] and isinstance(call.func, ast.Attribute)
            given = dict(zip(names[is_method:], call.args, strict=False))
            given |= {word.arg: word.value for word in call.keywords if word.arg}
            for name in [*names, *(argument.arg for argument in function.args.kwonlyargs)]:
                self.sources[scope, name].append(given.get(name))

    def dotted(self, node: ast.AST | None) -> str:
        """Return a name with its module: ``torch.distributed.init_process_group``; empty if not a name."""
        if isinstance(node, ast.Attribute):
            return f"{self.dotted(node.value)}.{node.attr}".removeprefix(".")
        return self.imports.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions with these names, whatever their module."""
        return [call for name in names for call in self.calls_by_name[name]]

    def mentions(self, pattern: str) -> Iterator[tuple[str, int]]:
        """Yield matching names of called functions and base classes, and matching strings, each with its line."""
        for node in self.scopes:
            names = [node.func] if isinstance(node, ast.Call) else getattr(node, "bases", [])
            texts = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            yield from ((t, node.lineno) for t in [*map(self.dotted, names), *texts] if re.fullmatch(pattern, t))

    def all_sources(self, name: ast.Name) -> list[ast.expr | None]:
        """Return all expressions given to a name in its innermost scope."""
        scope = self.scopes.get(name, "")
        while (scope, name.id) not in self.sources and scope:
            scope = scope.rpartition(".")[0]
        return self.sources.get((scope, name.id), [])

    def source(self, node: Any) -> Any:
        """Return the first expression given to a name; other expressions are returned unchanged."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(node, ast.Name) or not (sources := self.all_sources(node)):
                break
            node = sources[0]
        return node

    def value(self, node: ast.expr | None, depth: int = 0) -> Any:
        """Return the value of a literal, of arithmetic with literals, or of a name for them; None if unknown."""
        node = self.source(node)
        if isinstance(node, ast.BinOp) and depth < _MAX_DEPTH:
            left, right = (self.value(side, depth + 1) for side in (node.left, node.right))
            is_known = {type(left), type(right)} <= {int, float} and type(node.op) in _ARITHMETIC
            return _ARITHMETIC[type(node.op)](left, right) if is_known else None
        try:
            return None if node is None else ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None

    def entries(self, node: ast.expr | None) -> dict[str, Any]:
        """Return the string keys of a dict with their values, which are None if unknown."""
        node = self.source(node)
        pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
        return {text: self.value(value) for key, value in pairs if isinstance(text := self.value(key), str)}

    def words(self, node: ast.expr | None, depth: int = 0) -> list[str]:
        """Return the phases of training that an expression can be: ``train`` and ``val``."""
        sources: list[Any] = []
        match node:
            case ast.Constant(value=str(word)):
                return [word] if _PHASE_WORD.fullmatch(word) else []
            case ast.Call(func=ast.Attribute(value=inner, attr="upper" | "lower" | "title" | "capitalize" as change)):
                return [getattr(word, change)() for word in self.words(inner, depth)]
            case ast.IfExp(body=body, orelse=orelse):
                sources = [body, orelse]
            case ast.Name() if depth < _MAX_DEPTH:
                sources = self.all_sources(node)
        return list(dict.fromkeys(word for source in sources for word in self.words(source, depth + 1)))


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((word.value for word in call.keywords if word.arg == name), None)


# ---- kinds

_SIGNS = (
    (ScriptKind.HUGGING_FACE, r"transformers\.(\w+\.)*\w*Trainer"),
    (ScriptKind.LIGHTNING, r"(pytorch_)?lightning\.(\w+\.)*(Trainer|LightningCLI)"),
    (ScriptKind.TORCHRUN, r"(.*\.)?(init_process_group|DistributedDataParallel|FullyShardedDataParallel|Accelerator)"),
    (ScriptKind.TORCHRUN, "LOCAL_RANK|RANK|WORLD_SIZE"),
)
# The Trainer prints dicts: the loss at regular steps, that of each evaluation, and the mean loss at the end.
_TRAINER_METRICS = [ScriptMetric(name, rf"'{name}': '?{NUMBER}", 0) for name in ("loss", "eval_loss", "train_loss")]
_OTHER_PARSERS = re.compile(r"(absl|click|docopt|fire|jsonargparse|simple_parsing|tap|typer|tyro)\b")


def _script(path: Path, code: _Code) -> Script:
    if all(isinstance(node, (*_DEFINITIONS, ast.Import, ast.ImportFrom)) for node in code.tree.body):
        hint = "name the script that trains, or write a study with its model and data, like studies/custom_model.py"
        raise RayparError(f"{path}: only defines functions and classes, and trains nothing when run", hint=hint)
    kind, evidence = ScriptKind.PLAIN, ""
    for each, sign in _SIGNS:
        name, line = next(code.mentions(sign), ("", 0))
        if name and not (each is ScriptKind.TORCHRUN and code.calls_of("spawn")):  # it starts processes itself
            kind, evidence = each, f"{name.rpartition('.')[2]}, line {line}"
            break
    metrics, prints_epoch = _printed_metrics(code)
    if kind is ScriptKind.HUGGING_FACE:
        metrics += _TRAINER_METRICS
    elif kind is ScriptKind.LIGHTNING:
        metrics += _logged(code)
    parser, subcommand, options = _options(code)
    notes = []
    if _OTHER_PARSERS.match(parser):
        notes.append(
            f"options of {parser} are not recognised: add those that you want to set to the command: --name {{name}}"
        )
    if "'nccl'" in code.text and "gloo" not in code.text:
        notes.append("it uses NCCL, which needs GPUs")
    return Script(
        path=path,
        kind=kind,
        evidence=evidence,
        parser=parser,
        subcommand=subcommand,
        options=tuple({option.name: option for option in options if option.name.isidentifier()}.values()),
        metrics=tuple({metric.name: metric for metric in reversed(metrics)}.values())[::-1],
        epoch_pattern=EPOCH if prints_epoch else "",
        notes=tuple(notes),
    )


def _logged(code: _Code) -> list[ScriptMetric]:
    """Return the metrics that a Lightning module logs to event files or MLflow, and prints in a table after testing."""
    calls = [call for call in code.calls_of("log") if code.dotted(call.func) == "self.log" and call.args]
    logged = [(name, call.lineno) for call in calls if _METRIC.search(name := str(code.value(call.args[0])))]
    if code.calls_of("LightningCLI", "MLFlowLogger"):
        return [ScriptMetric(name, "", line) for name, line in logged]
    tested = logged if code.calls_of("test", "validate") else []
    return [ScriptMetric(n, rf"\b{re.escape(n)}\W+?{NUMBER}", line) for n, line in tested if _HELD_OUT.search(n)]


def _script_of_loop(path: Path, code: _Code) -> Script | None:
    """Return the script if Ray Train runs one of its functions on each worker, else None."""
    functions = {node.name: node for node in code.tree.body if isinstance(node, ast.FunctionDef)}
    trainers = code.calls_of("TorchTrainer")
    given = [node for call in trainers for node in [*call.args[:1], *(word.value for word in call.keywords)]]
    names = [node.id for node in given if isinstance(node, ast.Name)]
    reports = [call for call in code.calls if re.fullmatch(r"ray(\.\w+)*\.report", code.dotted(call.func))]
    reporting = [f"{code.scopes[call]}.".split(".")[1] for call in reports]
    names += [name for name in reporting if name in functions and len(functions[name].args.args) == 1]
    loop = next((functions[name] for name in names if name in functions), None)
    if loop is None:
        return None
    for node in code.tree.body:
        inner = (
            [] if isinstance(node, _DEFINITIONS) or "__name__" in ast.unparse(node).split("\n")[0] else ast.walk(node)
        )
        started = {code.dotted(call.func).rpartition(".")[2] for call in inner if isinstance(call, ast.Call)}
        if started & {"fit", "parse_args", "backward", "TorchTrainer", "main"}:
            what = f"{path}, line {node.lineno}: runs on import, but a study has to import the train loop"
            raise RayparError(what, hint='put it below `if __name__ == "__main__":`')
    config = loop.args.args[0].arg if loop.args.args else "config"
    keys = re.findall(rf"\b{config}(?:\[|\.get\()'(\w+)'(?:, ([^()\[\]=]+)\))?", ast.unparse(loop))
    defaults: dict[str, Any] = {}
    for key, default in keys:
        if defaults.get(key) is None:
            defaults[key] = code.value(ast.parse(default or "None", mode="eval").body)
    for call in trainers:
        defaults |= code.entries(_keyword(call, "train_loop_config"))
    entries = [(call.lineno, node) for call in reports for node in (*call.args[:1], _keyword(call, "metrics"))]
    lines = {key: line for line, node in entries for key in code.entries(node) if _METRIC.search(key)}
    return Script(
        path=path,
        kind=ScriptKind.TRAIN_LOOP,
        evidence=f"{loop.name}, line {loop.lineno}",
        train_loop=loop.name,
        options=tuple(ScriptOption(key, default=value, is_required=True) for key, value in defaults.items()),
        metrics=tuple(ScriptMetric(key, "", line) for key, line in lines.items()),
    )


# ---- options of the command line

# Options of transformers.TrainingArguments, not visible in a script; older versions require output_dir.
_TRAINING_ARGUMENTS = [
    ScriptOption("output_dir", "--output_dir"),
    ScriptOption("learning_rate", "--learning_rate", 5e-5, float),
    ScriptOption("per_device_train_batch_size", "--per_device_train_batch_size", 8, int),
    ScriptOption("num_train_epochs", "--num_train_epochs", 3.0, float),
]
# Field of a dataclass without a default.
_REQUIRED_FIELD = re.compile(r"(\w+): [^=]+( = [\w.]*field\((?!.*\bdefault(_factory)?=).*)?", re.DOTALL)


def _options(code: _Code) -> tuple[str, str, list[ScriptOption]]:
    """Return the parser of the command line, the word that must come first, and the options."""
    for call in code.calls_of("HfArgumentParser"):
        names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
        classes = [node for node in code.tree.body if isinstance(node, ast.ClassDef) and node.name in names]
        fields = [_REQUIRED_FIELD.fullmatch(ast.unparse(field)) for node in classes for field in node.body]
        options = [ScriptOption(field[1], f"--{field[1]}", is_required=True) for field in fields if field]
        options += _TRAINING_ARGUMENTS if "TrainingArguments" in code.text else []
        # Examples of transformers train only with this flag.
        return "HfArgumentParser", "--do_train" if ".do_train" in code.text else "", options
    if calls := code.calls_of("add_argument"):
        words = [str(code.value(call.args[0])) for call in code.calls_of("add_parser") if call.args]
        word = next((word for word in words if re.search("train|fit", word)), "".join(words[:1]))
        return "argparse", word, [option for call in calls if (option := _argument(code, call, word))]
    for call in code.calls_of("LightningCLI"):
        epochs = code.entries(_keyword(call, "trainer_defaults")).get("max_epochs")
        word = "" if code.value(_keyword(call, "run")) is False else "fit"
        return "LightningCLI", word, [ScriptOption("max_epochs", "--trainer.max_epochs", epochs, int, is_required=True)]
    if any(re.match(r"(hydra|omegaconf)\b", name) for name in code.imports.values()):
        return "hydra", "", _overrides(code)
    other = next(filter(None, map(_OTHER_PARSERS.match, code.imports.values())), None)
    return other[1] if other else "", "", []


def _overrides(code: _Code) -> list[ScriptOption]:
    """Return the keys that a script reads from a config of hydra or OmegaConf; defaults are in other files."""
    pairs = re.findall(r"@(?:\w+\.)?main\b.*\ndef \w+\((\w+)|(\w+)(?:: \w+)? = OmegaConf\.", code.text)
    configs = "|".join(filter(None, (name for pair in pairs for name in pair)))
    keys = re.findall(rf"\b(?:{configs})((?:\.[A-Za-z_]\w*)+)\b(?!\()", code.text) if configs else []
    leaves = [key[1:] for key in dict.fromkeys(keys) if not any(other.startswith(f"{key}.") for other in keys)]
    return [ScriptOption(key.replace(".", "_"), f"{key}=") for key in leaves]


def _argument(code: _Code, call: ast.Call, subcommand: str) -> ScriptOption | None:
    """Return the option of a call of ``add_argument``; None if it belongs to another subcommand."""
    given = {word.arg: code.value(word.value) for word in call.keywords}
    parser = code.source(getattr(call.func, "value", None))
    words = parser.args if isinstance(parser, ast.Call) and getattr(parser.func, "attr", "") == "add_parser" else []
    flags = [value for node in call.args if isinstance(value := code.value(node), str)]
    if not flags or (words and code.value(words[0]) != subcommand):
        return None
    flag = next((flag for flag in flags if flag.startswith("--")), flags[0])
    name = str(given.get("dest") or flag.lstrip("-").replace("-", "_"))
    if given.get("action", "store") != "store":
        return ScriptOption(name, flag, is_switch=True)
    is_positional = not flag.startswith("-")
    is_required = given.get("nargs") not in ("?", "*") if is_positional else given.get("required") is True
    default = given.get("default")
    kind = _TYPES.get(code.dotted(_keyword(call, "type")), type(default) if type(default) in (int, float) else str)
    if bool in (kind, type(default)):  # with type=bool, any non-empty text is True
        default, kind = None if default is None else str(default), str
    choices = given["choices"] if isinstance(given.get("choices"), (list, tuple)) else ()
    return ScriptOption(name, "" if is_positional else flag, default, kind, tuple(choices), is_required)


# ---- printed metrics

_METRIC = re.compile(rf"(?:^|[\W_])({'|'.join(WORDS.values())})(?:$|[\W_\d])", re.IGNORECASE)
_HELD_OUT = re.compile(r"(?:^|[\W_])(test|val|valid|validation|eval|evaluation|dev)(?:$|[\W_])", re.IGNORECASE)
_BEST = re.compile(r"(?:^|[\W_])best(?:$|[\W_])", re.IGNORECASE)
_PHASE = re.compile(r"(phase|split|mode|stage|prefix|tag|desc|subset|name)\W*$", re.IGNORECASE)
_FILLERS = {"average", "avg", "mean", "the", "epoch", "final", "current", "running", "cur", "set", "of", "on", "is"}
_SAME = {"acc": "accuracy", "ppl": "perplexity"} | dict.fromkeys(("valid", "validation", "eval", "evaluation"), "val")
_PRINTS = re.compile(r"(^|\.)(print0?|write)$")  # calls that print nothing before their text
_LOGS = re.compile(r"(^|\.)(info|warning|rank_zero_info)$")
_MLFLOW = re.compile(r"^mlflow\.(?:\w+\.)*log_metric(s?)$")
_PERCENT_FORMAT = re.compile(r"(%[-+ #0]*\d*(?:\.\d+)?[sdifgeEGr]|%%)")
_MAX_VARIANTS = 8  # variants of a line
# A private character stands for each value in the text of a line; one of the first range for a value without format,
# which may be a word, or a tensor that prints as tensor(…).
_BARE, _FORMATTED = 0x100000, 0x108000
_V = f"[{chr(_BARE)}-{chr(0x10FFFD)}]"
_LABEL = re.compile(r"(?P<words>[A-Za-z]\w*(?:[ /@-][A-Za-z]\w*)*)['\"]?\s*(?:[:=]+|->|is)?\s*\(?$")
_SHARE = re.compile(rf"{_V}\s*/[^A-Za-z%]*?(?P<share>{_V})\s*%")  # 9/10 (90%)


@dataclass(frozen=True)
class _PrintedLine:
    """Printed line: its text with a private character per value, each value's code, and the line of the script."""

    text: str
    values: Mapping[str, str]
    number: int

    def shown(self, only: str = "") -> str:
        """Return the text with invented numbers; with `only`, others that may be words are shown as code."""

        def show(match: re.Match[str]) -> str:
            is_code = only not in ("", match[0]) and ord(match[0]) < _FORMATTED
            return f"{{{self.values[match[0]]}}}" if is_code else f"{ord(match[0]) % 256 + 1.25}"

        return re.sub(_V, show, self.text).strip()


def _printed_metrics(code: _Code) -> tuple[list[ScriptMetric], bool]:
    """Return the metrics that a script prints, reports or logs to MLflow, and whether it prints the epoch number."""
    metrics: list[ScriptMetric] = []
    logged: list[ScriptMetric] = []
    lines: list[_PrintedLine] = []
    are_whole = True  # each starts a line of output
    for call in code.calls:
        name, first = code.dotted(call.func), call.args[0] if call.args else None
        is_print = bool(_PRINTS.search(name))
        is_json = is_print and isinstance(first, ast.Call) and code.dotted(first.func) == "json.dumps"
        if isinstance(first, ast.Call) and is_json:
            keys = filter(_METRIC.search, code.entries(next(iter(first.args), None)))
            metrics += [ScriptMetric(key, "", call.lineno) for key in keys]
        elif name == "raypar.report":
            metrics += [ScriptMetric(key, "", call.lineno) for key in code.entries(first)]
        elif of_mlflow := _MLFLOW.search(name):
            named = [*code.entries(first)] if of_mlflow[1] else [str(code.value(first))]
            logged += [ScriptMetric(key, "", call.lineno) for key in named if _METRIC.search(key)]
        elif is_print or _LOGS.search(name):
            printed = list(_lines(code, call, is_print))
            are_whole &= not printed or (is_print and code.value(_keyword(call, "end")) in (None, "\n"))
            lines += printed
    metrics += [metric for line in lines for metric in _metrics_of_line(line, lines, are_whole)]
    return metrics + logged, any(re.search(EPOCH, line.shown()) for line in lines)


def _lines(code: _Code, call: ast.Call, is_print: bool) -> Iterator[_PrintedLine]:
    """Yield the lines with values that a call prints, one per possible word of a value: ``train`` and ``val``."""
    values: dict[str, ast.expr] = {}
    if is_print or len(call.args) == 1:
        separator = code.value(_keyword(call, "sep"))
        text = (separator if isinstance(separator, str) else " ").join(_text(node, values) for node in call.args)
    else:
        text = _text(ast.BinOp(call.args[0], ast.Mod(), ast.Tuple(call.args[1:])), values) if call.args else ""
    codes = {place: ast.unparse(node) for place, node in values.items()}
    words = {codes[place]: each for place, node in values.items() if (each := code.words(node))}
    variants = list(product(*words.values()))
    for variant in variants if len(variants) <= _MAX_VARIANTS else [()]:
        phases = dict(zip(words, variant, strict=False))
        pieces = [phases.get(codes.get(piece, ""), piece) for piece in re.split(f"({_V})", text)]
        yield from (
            _PrintedLine(part, codes, call.lineno) for part in "".join(pieces).split("\n") if re.search(_V, part)
        )


def _text(node: ast.expr, values: dict[str, ast.expr]) -> str:
    """Return the printed text of an expression, and add its values to `values`."""

    def place(value: ast.expr, form: str) -> str:
        character = chr(len(values) + (_FORMATTED if form else _BARE))
        values[character] = value
        return character + "%" * form.endswith("%")

    unknown, pieces = ast.Constant(""), list[str]()
    match node:
        case ast.Constant(value=value):
            return re.sub(_V, "", str(value))
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, values) for part in parts)
        case ast.FormattedValue(value=value, format_spec=form):
            return place(value, ast.unparse(form).strip("f'\"") if form else "")
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, values) + _text(right, values)
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod(), right=right):
            given = iter(right.elts if isinstance(right, ast.Tuple) else [right])
            pieces = re.split(_PERCENT_FORMAT, text)  # texts and formats in turn
            pieces[1::2] = ["%" if f == "%%" else place(next(given, unknown), f.strip("%sr")) for f in pieces[1::2]]
            return "".join(pieces)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format"), args=args):
            given = iter(args)
            named = {word.arg: word.value for word in node.keywords}
            with suppress(ValueError):  # unbalanced braces
                for literal, field, spec, _ in Formatter().parse(text):
                    filled = named.get(re.split(r"[.[]", field or "")[0])
                    pieces += [literal, "" if field is None else place(filled or next(given, unknown), spec or "")]
                return "".join(pieces)
    return place(node, "")


def _metrics_of_line(line: _PrintedLine, lines: Sequence[_PrintedLine], are_whole: bool) -> Iterator[ScriptMetric]:
    """Yield the metrics of a line; `lines`: all printed lines."""
    others = [other.shown() for other in lines if other.text != line.text]
    is_twice = any(other.text == line.text and other.number != line.number for other in lines)
    pieces = re.split(f"({_V})", line.text)  # texts and values in turn
    for at in range(1, len(pieces), 2):
        value, before = pieces[at], "".join(pieces[:at])
        name = _name(pieces[at - 1], pieces[0])
        number = rf"(?:tensor\()?{NUMBER}" if ord(value) < _FORMATTED else NUMBER
        if name and pieces[at + 1].lstrip().startswith("/"):
            if not (share := _SHARE.match(line.text, len(before))):  # a count
                continue
            value, number = share["share"], NUMBER
        elif not name and re.search(r"\w", re.sub(_V, "", before)):  # the code of the value may name it
            words = re.findall(r"[A-Za-z_]\w*", line.values[value])
            name = _name(f"{next(filter(_METRIC.search, words), '')}:", before)
        before, _, after = line.text.partition(value)
        if after.lstrip().startswith("%"):
            name, number = name and f"{name}_percent", rf"{number}\s*%"
        patterns = [_expression(before) + number, rf"^\s*{_expression(before)}{number}"][: 1 + are_whole]
        alone = next((p for p in patterns if not any(re.search(p, other) for other in others)), "")
        sample = line.shown(only=value)
        if name and (match := re.search(alone or patterns[-1], sample)):
            has_phase = any(_PHASE.search(line.values[v]) for v in re.findall(_V, before) if ord(v) < _FORMATTED)
            is_mixed = not alone or is_twice or has_phase
            yield ScriptMetric(name, alone or patterns[-1], line.number, sample, match[1], is_mixed)


def _expression(text: str) -> str:
    """Return a regular expression for the text before a number, which may be padded."""
    escaped = re.sub(r"\\([-#&~])", r"\1", re.sub(r"(\\?\s)+", r"\\s+", re.escape(text.strip())))
    return re.sub(_V, ".*?", escaped) + r"\s*"


def _name(before: str, context: str) -> str:
    """Return the name of the metric before a value: ``test_loss`` for "Average loss: "; empty: not a metric.

    Args:
        context: beginning of the line: "Test set: ".
    """
    label, named = _LABEL.search(before), _METRIC.search(before)
    if label and _METRIC.search(" ".join(re.split(r"[ /@-]", label["words"])[-2:])):
        words, context = label["words"], f"{context} {before[: label.start()]}"
    elif named and before.rstrip().endswith((":", "=")):  # Accuracy on the test images:
        words, context = named[1], f"{context} {before}"
    else:
        return ""
    parts = [part for part in re.split(r"[\W_]+", words.lower()) if part and not part.isdigit()]
    parts = [_SAME.get(part, part) for part in parts if part not in _FILLERS]
    parts = parts[max(0, next((i for i, part in enumerate(parts) if _METRIC.search(part)), 0) - 1) :][:3]
    if (match := _HELD_OUT.search(context)) and not {"train", "training", "test", "val", "dev"} & set(parts):
        parts.insert(0, _SAME.get(match[1].lower(), match[1].lower()))
    if _BEST.search(f"{words} {context}") and parts[:1] != ["best"]:
        parts.insert(0, "best")
    return "_".join(parts)
