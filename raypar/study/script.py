"""Training scripts as their authors wrote them: kind, options and printed metrics, read by `ast`, never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any, TypeAlias

from raypar.errors import RayparError
from raypar.study.loader import read_python, syntax_error
from raypar.study.metric import WORDS, direction_of

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
MAX_BASE, MAX_EXPONENT = 1000, 64  # of powers that are worked out
NUMBER = r"([-+\d.,eE]*\d|[-+]?inf|nan)"
_UNKNOWN: Any = object()  # default that only running the script would show


class ScriptKind(StrEnum):
    """Kind of script, by which it is started."""

    TRAIN_LOOP = "Ray Train loop"
    HUGGING_FACE = "Hugging Face Trainer script"
    LIGHTNING = "Lightning script"
    TORCHRUN = "torchrun script"
    MODEL = "module with a model"
    PLAIN = "script"


@dataclass(frozen=True)
class ScriptOption:
    """Option of a script's command line, or key of a train loop's config.

    Attributes:
        name: as the script's code has it, an identifier.
        flag: as it is given: ``--batch-size``; empty: by its position.
        default: None: there is none, or only running the script would show it.
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


@dataclass(frozen=True)
class ScriptMetric:
    """Metric that a script prints or reports.

    Attributes:
        pattern: regular expression that finds it in a line of output; empty: it is reported, or in a JSON line. A
            percent sign after the value is in it, outside of the group.
        line: of the script.
        sample: such a line, with made-up numbers; empty where it has no pattern.
        value: the number in it that the pattern finds.
        is_mixed: the pattern also matches other lines that the script prints.
    """

    name: str
    pattern: str
    line: int
    sample: str = ""
    value: str = ""
    is_mixed: bool = False


@dataclass(frozen=True)
class ModelCode:
    """Class or function of a module that gives a network.

    Attributes:
        options: its parameters.
        sample_shape: shape of one input, as its first layer suggests; empty: unknown.
        num_tokens: size of its vocabulary where its inputs are tokens.
        is_regression: it has one output.
    """

    name: str
    options: tuple[ScriptOption, ...]
    sample_shape: tuple[int, ...] = ()
    num_tokens: int | None = None
    is_regression: bool = False


@dataclass(frozen=True)
class Script:
    """A script as read.

    Attributes:
        evidence: what shows its kind, with the line.
        parser: what reads its command line: "argparse"; empty: nothing that is known here.
        subcommand: word that its command line needs first.
        options: those of its command line, or of its train loop's config.
        metrics: those that it prints or reports.
        epoch_pattern: regular expression for the number of the epoch in what it prints; empty: it prints none.
        train_loop: name of its ``train_loop_per_worker``.
        model: the network of a module without training code.
        event_option: the option for the folder of its TensorBoard events.
        needs_do_train: it trains only with ``--do_train``, as examples of transformers do.
        notes: what stands in the way, one sentence each.
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
    model: ModelCode | None = None
    event_option: str = ""
    needs_do_train: bool = False
    notes: tuple[str, ...] = ()

    @property
    def is_imported(self) -> bool:
        """True if a study of it imports it, rather than running it."""
        return self.kind in (ScriptKind.TRAIN_LOOP, ScriptKind.MODEL)


def read_script(path: Path) -> Script:
    """Read a script.

    Raises:
        RayparError: there is no such file, or it is not Python.
    """
    source = read_python(path, "script")
    try:
        tree = ast.parse(source, str(path))
    except SyntaxError as error:
        raise syntax_error(path, error) from None
    except (ValueError, MemoryError, RecursionError) as error:  # null bytes; a thousand brackets
        raise RayparError(f"{path}: is not Python: {error}", hint="is it really a text file?") from None
    return _Reader(path, tree).script()


# ---- code


class _Reader:
    """A script's syntax tree with its names resolved."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path, self.tree = path, tree
        nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
        self.nodes: list[Any] = sorted(nodes, key=lambda node: (node.lineno, node.col_offset))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.imports: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {a.asname or a.name: f"{node.module or ''}.{a.name}" for a in node.names}
        self.definitions: dict[str, Definition] = {
            node.name: node
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        }
        self.constants: dict[str, ast.expr] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.constants.setdefault(node.targets[0].id, node.value)

    def dotted(self, node: ast.AST) -> str:
        """Return a name with its module: ``torch.distributed.init_process_group``; empty where it is no name."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else node.attr
        return ""

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Return calls of functions by their last names."""
        return [call for call in self.calls if self.dotted(call.func).rpartition(".")[2] in names]

    def uses(self, package: str) -> bool:
        return any(f"{name}.".startswith(f"{package}.") for name in self.imports.values())

    def value(self, node: ast.AST | None) -> Any:
        """Return the value of a literal, of arithmetic of literals, or of a name of one; else `_UNKNOWN`."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            node = self.constants[node.id]
        if isinstance(node, ast.BinOp):
            left, right = self.value(node.left), self.value(node.right)
            if any(type(side) not in (int, float) for side in (left, right)):
                return _UNKNOWN
            with_zero = isinstance(node.op, ast.Div) and not right
            apply = _ARITHMETIC.get(type(node.op))
            return _UNKNOWN if apply is None or with_zero else apply(left, right)
        try:
            return _UNKNOWN if node is None else ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return _UNKNOWN

    def script(self) -> Script:
        """Return what was read."""
        printed, prints_epoch = _metrics(self)
        epoch_pattern = EPOCH if prints_epoch else ""
        script = Script(self.path, ScriptKind.PLAIN, metrics=tuple(printed), epoch_pattern=epoch_pattern)
        if loop := self._train_loop():
            if problem := self._runs_on_import():
                return replace(self._command(script), notes=(problem,))
            return self._of_loop(script, loop)
        for kind, evidence in self._kinds():
            metrics = script.metrics
            if kind is ScriptKind.LIGHTNING:
                metrics = (*metrics, *self._logged())
            elif kind is ScriptKind.HUGGING_FACE:
                metrics = (*metrics, *TRAINER_METRICS)
            unique = {metric.name: metric for metric in reversed(metrics)}
            metrics = tuple(reversed(unique.values()))
            return self._command(replace(script, kind=kind, evidence=evidence, metrics=metrics))
        if not self._trains() and (model := self._model()) is not None:
            where = self.definitions[model.name].lineno
            return replace(script, kind=ScriptKind.MODEL, evidence=f"{model.name}, line {where}", model=model)
        return self._command(script)

    def _logged(self) -> Iterator[ScriptMetric]:
        """Yield what a Lightning module logs: all in the event files, what is tested also in a table at the end."""
        with_events = bool(self.calls_of("LightningCLI"))
        is_tested = bool(self.calls_of("test", "validate"))
        for call in self.calls_of("log"):
            name = self.value(call.args[0]) if call.args and self.dotted(call.func) == "self.log" else None
            if not isinstance(name, str) or not _is_metric(name):
                continue
            if with_events:
                yield ScriptMetric(name, "", call.lineno)
            elif is_tested and _HELD_OUT.search(name):
                yield ScriptMetric(name, rf"\b{_literal(name)}\W+?{NUMBER}", call.lineno)

    # ---- kind

    def _kinds(self) -> Iterator[tuple[ScriptKind, str]]:
        for call in self.calls:
            name = self.dotted(call.func)
            package, _, last = name.rpartition(".")
            where = f"{last}, line {call.lineno}"
            if package.startswith("transformers") and last.endswith("Trainer"):
                yield ScriptKind.HUGGING_FACE, where
            elif re.match(r"(pytorch_)?lightning\b", package) and last in ("Trainer", "LightningCLI"):
                yield ScriptKind.LIGHTNING, where
        bases = [base for node in self.definitions.values() if isinstance(node, ast.ClassDef) for base in node.bases]
        if any(self.dotted(base).startswith("transformers.") and "Trainer" in self.dotted(base) for base in bases):
            yield ScriptKind.HUGGING_FACE, "a subclass of Trainer"
        if self.calls_of("spawn"):  # it starts its own processes
            return
        for call in self.calls_of("init_process_group", "DistributedDataParallel", "FullyShardedDataParallel"):
            yield ScriptKind.TORCHRUN, f"{self.dotted(call.func).rpartition('.')[2]}, line {call.lineno}"
        for call in self.calls_of("Accelerator"):
            yield ScriptKind.TORCHRUN, f"Accelerator, line {call.lineno}"
        for node in self.nodes:
            if isinstance(node, ast.Constant) and node.value in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
                yield ScriptKind.TORCHRUN, f"{node.value}, line {node.lineno}"

    def _trains(self) -> bool:
        return bool(self.calls_of("backward", "fit", "parse_args"))

    def _runs_on_import(self) -> str:
        """Return why a module can't be imported without starting its training; empty where it can."""
        for node in self.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
                continue
            for call in ast.walk(node):
                last = self.dotted(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
                if last in ("fit", "parse_args", "backward", "TorchTrainer", "main"):
                    return (
                        f"line {node.lineno} runs when the script is imported: put it below "
                        '`if __name__ == "__main__":` and its train loop can be studied by itself'
                    )
        return ""

    # ---- train loops

    def _train_loop(self) -> str:
        for call in self.calls_of("TorchTrainer"):
            for node in [*call.args[:1], *(word.value for word in call.keywords)]:
                if isinstance(node, ast.Name) and isinstance(self.definitions.get(node.id), ast.FunctionDef):
                    return node.id
        for name, function in self.definitions.items():
            if isinstance(function, ast.FunctionDef) and len(function.args.args) == 1 and self._reports(function):
                return name
        return ""

    def _reports(self, parent: ast.AST) -> list[ast.Call]:
        calls = [node for node in ast.walk(parent) if isinstance(node, ast.Call)]
        return [c for c in calls if re.fullmatch(r"ray(\.\w+)*\.report", self.dotted(c.func))]

    def _of_loop(self, script: Script, name: str) -> Script:
        function = self.definitions[name]
        assert isinstance(function, ast.FunctionDef)
        defaults: dict[str, Any] = {}
        for call in self.calls_of("TorchTrainer"):
            for word in call.keywords:
                if word.arg == "train_loop_config":
                    defaults |= self._entries(word.value)
        options: dict[str, Any] = {}
        config = function.args.args[0].arg if function.args.args else ""
        for node in ast.walk(function):
            base = getattr(node, "value", None) or getattr(getattr(node, "func", None), "value", None)
            if not (isinstance(base, ast.Name) and base.id == config):
                continue
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                options.setdefault(str(node.slice.value), None)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
                default = self.value(node.args[1]) if len(node.args) > 1 else None
                options[str(self.value(node.args[0]))] = None if default is _UNKNOWN else default
        options |= defaults
        reported: dict[str, int] = {}
        for call in self._reports(function):
            for given in [*call.args[:1], *(word.value for word in call.keywords if word.arg == "metrics")]:
                keys = given.keys if isinstance(given := self._resolved(given), ast.Dict) else []
                reported |= {str(key.value): call.lineno for key in keys if isinstance(key, ast.Constant)}
        return replace(
            script,
            kind=ScriptKind.TRAIN_LOOP,
            evidence=f"{name}, line {function.lineno}",
            train_loop=name,
            options=tuple(
                ScriptOption(key, default=value, kind=type(value) if value is not None else str, is_required=True)
                for key, value in options.items()
            ),
            metrics=tuple(ScriptMetric(key, "", line) for key, line in reported.items() if _is_metric(key)),
        )

    def _resolved(self, node: ast.expr) -> ast.expr:
        return self.constants.get(node.id, node) if isinstance(node, ast.Name) else node

    def _entries(self, node: ast.expr) -> dict[str, Any]:
        """Return the literal entries of a dict."""
        node = self._resolved(node)
        if isinstance(node, ast.Dict):
            pairs = [(self.value(key), value) for key, value in zip(node.keys, node.values, strict=True)]
        elif isinstance(node, ast.Call) and self.dotted(node.func) == "dict":
            pairs = [(word.arg, word.value) for word in node.keywords]
        else:
            return {}
        values = {key: self.value(value) for key, value in pairs if isinstance(key, str)}
        return {key: None if value is _UNKNOWN else value for key, value in values.items()}

    # ---- models

    def _model(self) -> ModelCode | None:
        modules: list[str] = []
        for name, node in self.definitions.items():
            if isinstance(node, ast.ClassDef):
                bases = [self.dotted(base) for base in node.bases]
                if any(base in ("torch.nn.Module", "torch.nn.Sequential", "nn.Module", *modules) for base in bases):
                    modules.append(name)
        makers = [
            name
            for name, node in self.definitions.items()
            if isinstance(node, ast.FunctionDef) and not name.startswith("_") and self._gives_model(node, modules)
        ]
        inner = {
            node.id
            for name in modules
            for node in ast.walk(self.definitions[name])
            if isinstance(node, ast.Name) and node.id != name
        }
        outer = [name for name in modules if name not in inner]
        for name in [*sorted(makers, key=lambda name: "model" not in name)[:1], *reversed(outer)]:
            node = self.definitions[name]
            body = list(node.body)
            init = next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
            function = node if isinstance(node, ast.FunctionDef) else init
            options = tuple(self._parameters(function, is_method=function is init)) if function else ()
            return self._with_shape(ModelCode(name, options), node, modules)
        return None

    def _gives_model(self, function: ast.FunctionDef, modules: Sequence[str]) -> bool:
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                value = node.value
                if isinstance(value, ast.Name):
                    assigned = [n for n in ast.walk(function) if isinstance(n, ast.Assign)]
                    targets = [n.value for n in assigned if isinstance(n.targets[0], ast.Name)]
                    names = [n.targets[0].id for n in assigned if isinstance(n.targets[0], ast.Name)]
                    value = dict(zip(names, targets, strict=True)).get(value.id, value)
                if isinstance(value, ast.Call):
                    made = self.dotted(value.func)
                    return made in modules or made in ("torch.nn.Sequential", "nn.Sequential")
        return False

    def _parameters(self, function: ast.FunctionDef, *, is_method: bool) -> Iterator[ScriptOption]:
        arguments = function.args.args[1:] if is_method else function.args.args
        every = [*arguments, *function.args.kwonlyargs]
        defaults: list[ast.expr | None] = [None] * (len(arguments) - len(function.args.defaults))
        defaults += [*function.args.defaults[-len(arguments) :], *function.args.kw_defaults] if arguments else []
        for argument, node in zip(every, defaults, strict=False):
            annotation = ast.unparse(argument.annotation) if argument.annotation else ""
            value = self.value(node)
            is_known = node is not None and isinstance(value, (bool, int, float, str))
            kind = type(value) if is_known else _TYPES.get(annotation, str)
            if node is None or is_known:
                yield ScriptOption(
                    argument.arg, default=value if is_known else None, kind=kind, is_required=node is None
                )

    def _with_shape(self, model: ModelCode, node: Definition, modules: Sequence[str]) -> ModelCode:
        values = {option.name: option.default for option in model.options}
        layers: list[ast.Call] = []
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & set(modules)
        for part in (node, *(self.definitions[name] for name in sorted(used))):
            calls = [n for n in ast.walk(part) if isinstance(n, ast.Call) and self.dotted(n.func).startswith(_LAYERS)]
            calls = [
                n
                for n in calls
                if self.dotted(n.func).rpartition(".")[2] in ("Linear", "Conv2d", "Embedding", "EmbeddingBag")
            ]
            layers = layers or sorted(calls, key=lambda n: n.lineno)

        def number(call: ast.Call, position: int) -> int | None:
            arguments = [*call.args, *(word.value for word in call.keywords)]
            at = arguments[position] if position < len(arguments) else None
            value = values.get(at.id) if isinstance(at, ast.Name) else self.value(at)
            if isinstance(at, ast.Name) and at.id in values and value is None:
                value = guess(next(o for o in model.options if o.name == at.id))
            return value if isinstance(value, int) else None

        if not layers or (size := number(layers[0], 0)) is None:
            return model
        first = self.dotted(layers[0].func).rpartition(".")[2]
        is_regression = self.dotted(layers[-1].func).endswith("Linear") and number(layers[-1], 1) == 1
        model = replace(model, is_regression=is_regression)
        if first == "Linear":
            return replace(model, sample_shape=(size,))
        if first == "Conv2d":
            side = 28 if size == 1 else 32
            return replace(model, sample_shape=(size, side, side))
        return replace(model, sample_shape=(32,), num_tokens=size)

    # ---- options of the command line

    def _command(self, script: Script) -> Script:
        for read in (_hugging_face, _argparse, _typer, _click, _fire, _lightning_cli):
            if parsed := read(self):
                parser, subcommand, options = parsed
                unique = {option.name: option for option in options if option.name.isidentifier()}
                script = replace(script, parser=parser, subcommand=subcommand, options=tuple(unique.values()))
                break
        if script.parser == "HfArgumentParser":
            asks = any(isinstance(node, ast.Attribute) and node.attr == "do_train" for node in self.nodes)
            script = replace(script, needs_do_train=asks)
        if any(name.startswith("hydra.") or name == "hydra" for name in self.imports.values()):
            note = "its options come from hydra: add those to set to the command, such as training.lr={lr}"
            script = replace(script, notes=(*script.notes, note))
        folders = [o.flag for o in script.options if re.search(r"log_?dir|tensorboard|tb_dir", o.name) and o.flag]
        if self.calls_of("SummaryWriter") and folders:
            tags = {self.value(call.args[0]): call.lineno for call in self.calls_of("add_scalar") if call.args}
            logged = [ScriptMetric(tag, "", line) for tag, line in tags.items() if _is_metric(str(tag))]
            script = replace(script, event_option=folders[0], metrics=(*script.metrics, *logged))
        if re.search(r"[\"']nccl[\"']", ast.unparse(self.tree)) and "gloo" not in ast.unparse(self.tree):
            script = replace(script, notes=(*script.notes, "it asks for NCCL: it runs on GPUs only"))
        return script


_LAYERS = ("torch.nn", "nn.")
_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b if abs(a) <= MAX_BASE and abs(b) <= MAX_EXPONENT and (a > 0 or b > 0) else _UNKNOWN,
}
# A parser of command lines: its name, the word of a subcommand, and the options.
Parsed: TypeAlias = tuple[str, str, list[ScriptOption]] | None


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((word.value for word in call.keywords if word.arg == name), None)


def _typed(annotation: ast.expr | None, default: Any) -> type:
    """Return the type of an option by its annotation, ``int | None`` and ``Optional[int]`` too, else by its default."""
    names = re.findall(r"\b(int|float|bool|str)\b", ast.unparse(annotation)) if annotation is not None else []
    if names:
        return _TYPES[names[0]]
    return type(default) if isinstance(default, (bool, int, float)) else str


def _option(
    name: str, flag: str, default: Any, kind: type, *, is_required: bool, choices: Sequence[Any] = ()
) -> ScriptOption:
    simple = default if type(default) in (int, float, str, bool) else None
    is_switch = kind is bool
    return ScriptOption(name, flag, simple, kind, tuple(choices), is_required and not is_switch, is_switch)


def _argparse(reader: _Reader) -> Parsed:
    calls = reader.calls_of("add_argument")
    if not calls:
        return None
    subparsers = {}  # variable to word
    for node in reader.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            call = node.value
            if getattr(call.func, "attr", "") == "add_parser" and call.args:
                subparsers[node.targets[0].id] = str(reader.value(call.args[0]))
    words = list(subparsers.values())
    subcommand = next((word for word in words if re.search("train|fit", word)), words[0] if words else "")
    options = []
    for call in calls:
        receiver = getattr(call.func, "value", None)
        word = subparsers.get(receiver.id) if isinstance(receiver, ast.Name) else None
        if word not in (None, subcommand):
            continue
        if option := _argument(reader, call):
            options.append(option)
    return "argparse", subcommand, options


def _argument(reader: _Reader, call: ast.Call) -> ScriptOption | None:
    flags = [value for arg in call.args if isinstance(value := reader.value(arg), str)]
    if not flags:
        return None
    flag = next((f for f in flags if f.startswith("--")), flags[0])
    dest = reader.value(_keyword(call, "dest"))
    name = dest if isinstance(dest, str) else flag.lstrip("-").replace("-", "_")
    action = _keyword(call, "action")
    actions = ast.unparse(action).strip("'\"") if action is not None else "store"
    default = reader.value(_keyword(call, "default"))
    choices = reader.value(_keyword(call, "choices"))
    given = _keyword(call, "type")
    kind = _TYPES.get(reader.dotted(given)) if given is not None else None
    kind = kind or (type(default) if type(default) in (int, float) else str)
    is_positional, nargs = not flag.startswith("-"), reader.value(_keyword(call, "nargs"))
    is_required = (is_positional and nargs not in ("?", "*")) or reader.value(_keyword(call, "required")) is True
    if actions != "store":
        return ScriptOption(name, flag, is_switch=True)
    if kind is bool:  # type=bool takes a value
        return ScriptOption(name, flag, str(default), str, is_required=is_required)
    listed = choices if isinstance(choices, (list, tuple)) else ()
    return _option(name, "" if is_positional else flag, default, kind, is_required=is_required, choices=listed)


def _hugging_face(reader: _Reader) -> Parsed:
    calls = reader.calls_of("HfArgumentParser")
    if not calls or not calls[0].args:
        return None
    classes = calls[0].args[0]
    names = [
        n.id
        for n in (classes.elts if isinstance(classes, (ast.Tuple, ast.List)) else [classes])
        if isinstance(n, ast.Name)
    ]
    options: list[ScriptOption] = []
    for name in names:
        node = reader.definitions.get(name)
        bases = (
            [reader.dotted(base) for base in node.bases]
            if isinstance(node, ast.ClassDef)
            else [reader.dotted(ast.Name(name))]
        )
        if any(base.endswith("TrainingArguments") for base in bases):
            options += TRAINING_ARGUMENTS
        for entry in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                options.append(_field(reader, entry.target.id, entry))
    return "HfArgumentParser", "", options


# Of transformers.TrainingArguments, which a script's own text doesn't show; output_dir is required in older versions.
TRAINING_ARGUMENTS = (
    ScriptOption("output_dir", "--output_dir", kind=str),
    ScriptOption("learning_rate", "--learning_rate", 5e-5, float),
    ScriptOption("per_device_train_batch_size", "--per_device_train_batch_size", 8, int),
    ScriptOption("num_train_epochs", "--num_train_epochs", 3.0, float),
)


# The Trainer prints dicts: a loss every so many steps, one of an evaluation, and their mean at the end.
TRAINER_METRICS = tuple(ScriptMetric(name, rf"'{name}': '?{NUMBER}", 0) for name in ("loss", "eval_loss", "train_loss"))


def _field(reader: _Reader, name: str, entry: ast.AnnAssign) -> ScriptOption:
    value, has_default = entry.value, entry.value is not None
    if isinstance(value, ast.Call) and reader.dotted(value.func).endswith("field"):
        has_default = bool(_keyword(value, "default") or _keyword(value, "default_factory"))
        value = _keyword(value, "default")
    default = reader.value(value)
    kind = _typed(entry.annotation, default)
    return _option(name, f"--{name}", default, kind, is_required=not has_default)


def _commands(reader: _Reader, package: str) -> list[tuple[ast.FunctionDef, str]]:
    """Return the functions that are commands of typer or click, with their words."""
    commands = []
    for node in reader.definitions.values():
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(call, ast.Attribute) and call.attr == "command":
                given = reader.value(decorator.args[0]) if isinstance(decorator, ast.Call) and decorator.args else None
                assert isinstance(node, ast.FunctionDef)
                commands.append((node, str(given) if isinstance(given, str) else node.name.replace("_", "-")))
    for call in reader.calls:
        if reader.dotted(call.func) == f"{package}.run" and call.args and isinstance(call.args[0], ast.Name):
            function = reader.definitions.get(call.args[0].id)
            if isinstance(function, ast.FunctionDef):
                commands.append((function, ""))
    return commands


def _chosen_command(reader: _Reader, package: str) -> tuple[ast.FunctionDef, str] | None:
    commands = _commands(reader, package)
    if not reader.uses(package) or not commands:
        return None
    function, word = next((c for c in commands if re.search("train|fit", c[1])), commands[0])
    is_group = len(commands) > 1 or bool(reader.calls_of("callback", "group"))
    return function, word if is_group else ""


def _signature(function: ast.FunctionDef) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    arguments, defaults = function.args.args, function.args.defaults
    padded: list[ast.expr | None] = [*([None] * (len(arguments) - len(defaults))), *defaults]
    yield from zip(arguments, padded, strict=True)
    yield from zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)


def _typer(reader: _Reader) -> Parsed:
    if not (chosen := _chosen_command(reader, "typer")):
        return None
    function, word = chosen
    options = []
    for argument, default_node in _signature(function):
        annotation, given, default = argument.annotation, None, default_node
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Annotated"):
            parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            given = next((part for part in parts[1:] if isinstance(part, ast.Call)), None)
            annotation = parts[0]
        elif isinstance(default, ast.Call) and reader.dotted(default.func).startswith("typer."):
            given = default
            default = given.args[0] if given.args else _keyword(given, "default")
            if isinstance(default, ast.Constant) and default.value is ...:
                default = None
        kind_of_parameter = reader.dotted(given.func).rpartition(".")[2] if given is not None else ""
        is_positional = kind_of_parameter == "Argument" or (not kind_of_parameter and default is None)
        words = [v for a in (given.args if given is not None else ()) if isinstance(v := reader.value(a), str)]
        flag = next((w.partition("/")[0] for w in words if w.startswith("--")), "--" + argument.arg.replace("_", "-"))
        value = reader.value(default)
        kind = _typed(annotation, value)
        option = _option(argument.arg, "" if is_positional else flag, value, kind, is_required=default is None)
        if not is_positional or default is None:
            options.append(option)
    return "typer", word, options


def _click(reader: _Reader) -> Parsed:
    is_click = reader.uses("click")
    functions = [node for node in reader.definitions.values() if isinstance(node, ast.FunctionDef)]
    decorated = {
        node.name: [d for d in node.decorator_list if isinstance(d, ast.Call)]
        for node in functions
        if any(re.search(r"\bcommand\b", ast.unparse(d)) for d in node.decorator_list)
    }
    if not is_click or not decorated:
        return None
    chosen = _chosen_command(reader, "click")
    name = chosen[0].name if chosen else next(iter(decorated))
    options = []
    for call in decorated.get(name, []):
        last = reader.dotted(call.func).rpartition(".")[2]
        words = [v for arg in call.args if isinstance(v := reader.value(arg), str)]
        if last not in ("option", "argument") or not words:
            continue
        flag = next((w for w in words if w.startswith("--")), words[0])
        plain = next((w for w in words if not w.startswith("-")), flag.partition("/")[0].lstrip("-").replace("-", "_"))
        default = reader.value(_keyword(call, "default"))
        given = _keyword(call, "type")
        kind = _typed(given, default)
        if reader.value(_keyword(call, "is_flag")) is True or "/" in flag:
            options.append(ScriptOption(plain, flag, is_switch=True))
            continue
        is_required = reader.value(_keyword(call, "required")) is True
        if last == "argument":
            is_required = _keyword(call, "default") is None and reader.value(_keyword(call, "required")) is not False
            flag = ""
        if flag or is_required:
            options.append(_option(plain, flag, default, kind, is_required=is_required))
    word = chosen[1] if chosen and reader.calls_of("group") else ""
    return "click", word, options


def _fire(reader: _Reader) -> Parsed:
    for call in reader.calls_of("Fire"):
        target = reader.definitions.get(call.args[0].id) if call.args and isinstance(call.args[0], ast.Name) else None
        if isinstance(target, ast.FunctionDef):
            options = []
            for argument, default in _signature(target):
                value = reader.value(default)
                kind = _typed(argument.annotation, value)
                options.append(_option(argument.arg, f"--{argument.arg}", value, kind, is_required=default is None))
            return "fire", "", options
    return None


def _lightning_cli(reader: _Reader) -> Parsed:
    calls = reader.calls_of("LightningCLI")
    if not calls:
        return None
    given = _keyword(calls[0], "trainer_defaults")
    max_epochs = reader._entries(given).get("max_epochs") if given is not None else None
    subcommand = "" if reader.value(_keyword(calls[0], "run")) is False else "fit"
    kind = max_epochs if isinstance(max_epochs, int) else None
    return "LightningCLI", subcommand, [_option("max_epochs", "--trainer.max_epochs", kind, int, is_required=True)]


# ---- metrics


_METRIC = re.compile(rf"(?:^|[\W_])(?:{'|'.join(WORDS.values())})(?:$|[\W_\d])", re.IGNORECASE)
_HELD_OUT = re.compile(r"(?:^|[\W_])(test|val|valid|validation|eval|evaluation|dev)(?:$|[\W_])", re.IGNORECASE)
_FILLERS = {"average", "avg", "mean", "the", "epoch", "final", "current", "running", "cur", "set", "of", "on", "is"}
_SAME = {
    "acc": "accuracy",
    "ppl": "perplexity",
    "valid": "val",
    "validation": "val",
    "eval": "val",
    "evaluation": "val",
}
_LABEL = re.compile(r"(?P<words>[A-Za-z]\w*(?:[ /@-][A-Za-z]\w*)*)['\"]?\s*(?:[:=]+|->|is)?\s*\(?$")
_PERCENT_FORMAT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdifgeEGr]|%%")
_NOT_AT_START = re.compile(r"(print|echo|write|print0)$")  # calls that put nothing before their text
_BEST = re.compile(r"(?:^|[\W_])best(?:$|[\W_])", re.IGNORECASE)
EPOCH = r"(?i)\bepoch\W{0,3}(\d+)"  # of a line
MAX_VARIANTS = 8  # of a print whose words vary


@dataclass(frozen=True)
class _Hole:
    """Value in a printed text.

    Attributes:
        form: how it is formatted, for `str.format`, or with a percent sign for that operator; empty: as it is, so that
            a tensor shows as tensor(…).
    """

    code: str
    form: str = ""

    @property
    def is_bare(self) -> bool:
        return self.form in ("", "%s", "%r")

    def shown(self, number: float) -> str:
        """Return a number as it would be printed."""
        for value in (number, int(number)):
            try:
                return self.form % value if self.form.startswith("%") else (self.form or "{}").format(value)
            except (ValueError, TypeError, KeyError, IndexError):
                continue
        return str(number)


Piece: TypeAlias = str | _Hole


def is_better_larger(name: str) -> bool:
    """Return whether a metric of this name, as far as it shows, is better when it is larger."""
    return direction_of(name) == "max"


def _is_metric(name: str) -> bool:
    return bool(_METRIC.search(name))


def _metrics(reader: _Reader) -> tuple[list[ScriptMetric], bool]:
    """Return the metrics that a script prints or reports, and whether it prints the number of the epoch."""
    metrics: dict[str, ScriptMetric] = {}
    printed: list[_PrintedLine] = []
    for call in reader.calls:
        name = reader.dotted(call.func)
        if name == "raypar.report" and call.args:
            for key in reader._entries(call.args[0]):
                metrics.setdefault(key, ScriptMetric(key, "", call.lineno))
            continue
        if not re.search(r"(^|\.)(print|info|warning|debug|critical|write|echo|secho|print0|rank_zero_info)$", name):
            continue
        if keys := _json_keys(reader, call):
            for key in filter(_is_metric, keys):
                metrics.setdefault(key, ScriptMetric(key, "", call.lineno))
            continue
        for pieces in _variants(reader, call, _printed(reader, call)):
            is_alone = bool(_NOT_AT_START.search(name)) and reader.value(_keyword(call, "end")) in (_UNKNOWN, "\n")
            printed += [_PrintedLine(tuple(pieces), call.lineno, is_alone) for pieces in _lines(pieces)]
    are_whole = all(line.is_alone for line in printed if any(isinstance(piece, _Hole) for piece in line.pieces))
    for line in printed:
        for metric in _metrics_of_line(line, printed, are_whole):
            metrics.setdefault(metric.name, metric)
    return list(metrics.values()), any(_prints_epoch(line) for line in printed)


@dataclass(frozen=True)
class _PrintedLine:
    """A line that a script prints.

    Attributes:
        pieces: literal texts and values in turn, texts first and last.
        number: line of the script.
        is_alone: nothing else is printed in the same line.
    """

    pieces: tuple[Piece, ...]
    number: int
    is_alone: bool

    def shown(self, at: int | None = None) -> list[str]:
        """Return the pieces as they are printed, with made-up numbers.

        Args:
            at: the index of a value; others that are printed as they are, numbers or words, are shown as their code.
        """
        texts = []
        for i, piece in enumerate(self.pieces):
            if isinstance(piece, str):
                texts.append(piece)
            elif piece.is_bare and at not in (None, i):
                texts.append(f"{{{piece.code}}}")
            else:
                texts.append(piece.shown(i // 2 + 1.25))
        return texts

    @property
    def text(self) -> str:
        """The line without its values."""
        return "\0".join(str(piece) for piece in self.pieces[::2])


def _variants(reader: _Reader, call: ast.Call, pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return what a call prints, once for each word that a value of it may be: ``train`` and ``val``."""
    codes = dict.fromkeys(piece.code for piece in pieces if isinstance(piece, _Hole))
    words = {code: of_code for code in codes if (of_code := _words(reader, call, code))}
    chosen = [dict(zip(words, each, strict=True)) for each in product(*words.values())]
    if len(chosen) > MAX_VARIANTS:
        return [list(pieces)]
    return [[p if isinstance(p, str) else each.get(p.code, p) for p in pieces] for each in chosen]


def _words(reader: _Reader, call: ast.Call, code: str) -> list[str]:
    """Return the words that a printed value can take, from the loops and calls around it; empty for other values."""
    try:
        node = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError):
        return []
    change = ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
        change, node = node.func.attr, node.func.value
    if isinstance(node, ast.Name):
        words = _words_of_name(reader, call, node.id)
    else:
        words = _choices(node)
    if change in ("upper", "lower", "title", "capitalize", "strip"):
        return [getattr(word, change)() for word in words]
    return [] if change else words


def _choices(node: ast.AST | None) -> list[str]:
    """Return the two words of ``"train" if training else "val"``."""
    parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else []
    words = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return words if len(words) == len(parts) else []


def _words_of_name(reader: _Reader, call: ast.Call, name: str) -> list[str]:
    loops = [node for node in reader.nodes if isinstance(node, ast.For)]
    around = [node for node in loops if node.lineno <= call.lineno <= (node.end_lineno or node.lineno)]
    for loop in reversed(around):
        targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
        names = [target.id if isinstance(target, ast.Name) else "" for target in targets]
        if name in names:
            return _iterated(reader, loop.iter, names.index(name), len(names))
    functions = [node for node in reader.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for function in reversed([f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or f.lineno)]):
        parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        if name in parameters or name in [argument.arg for argument in function.args.kwonlyargs]:
            return _given(reader, function.name, name, parameters)
    return _choices(reader.constants.get(name))


def _iterated(reader: _Reader, node: ast.expr, at: int, num: int) -> list[str]:
    """Return the words that a loop's target takes.

    Args:
        at: index of the target.
        num: number of targets.
    """
    last = reader.dotted(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    if isinstance(node, ast.Call) and last in ("zip", "enumerate") and num > 1:
        arguments = node.args if last == "zip" else [None, *node.args[:1]]
        given = arguments[at] if at < len(arguments) else None
        return _iterated(reader, given, 0, 1) if given is not None else []
    if last in ("items", "keys") and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and at == 0:
        return list(reader._entries(node.func.value))
    if last in ("sorted", "reversed", "list", "tuple", "tqdm") and isinstance(node, ast.Call) and node.args:
        return _iterated(reader, node.args[0], at, num)
    values = reader.value(node)
    if num > 1 and isinstance(values, (list, tuple)):
        values = [value[at] for value in values if isinstance(value, (list, tuple)) and len(value) == num]
    if isinstance(values, dict) or (values is _UNKNOWN and reader._entries(node)):
        values = list(reader._entries(node)) if num == 1 else []
    is_words = isinstance(values, (list, tuple)) and all(isinstance(value, str) for value in values)
    return list(dict.fromkeys(values)) if is_words else []


def _given(reader: _Reader, function: str, parameter: str, parameters: Sequence[str]) -> list[str]:
    """Return the words that the script's calls of a function give a parameter; none where one gives no word."""
    words: list[Any] = []
    for call in reader.calls_of(function):
        before = parameters[:1] == ["self"] and isinstance(call.func, ast.Attribute)
        at = parameters.index(parameter) - before if parameter in parameters else -1
        node = call.args[at] if 0 <= at < len(call.args) else _keyword(call, parameter)
        words += _choices(node) or [reader.value(node)]
    return list(dict.fromkeys(words)) if all(isinstance(word, str) for word in words) else []


def _json_keys(reader: _Reader, call: ast.Call) -> list[str]:
    """Return the keys of a dict that is printed as JSON."""
    for inner in call.args:
        if isinstance(inner, ast.Call) and reader.dotted(inner.func) == "json.dumps" and inner.args:
            return list(reader._entries(inner.args[0]))
    return []


def _printed(reader: _Reader, call: ast.Call) -> list[Piece]:
    """Return what a call prints, as literal texts and values."""
    is_log = not re.search(r"(print|echo|write|print0)$", reader.dotted(call.func))
    if is_log and len(call.args) > 1 and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str):
        return _formatted(call.args[0].value, call.args[1:])
    separator = reader.value(_keyword(call, "sep"))
    between = separator if isinstance(separator, str) else " "
    pieces: list[Piece] = []
    for argument in call.args:
        pieces += [between, *_pieces(argument)] if pieces else _pieces(argument)
    return pieces


def _pieces(node: ast.expr) -> list[Piece]:
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        pieces: list[Piece] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                spec = part.format_spec.values if isinstance(part.format_spec, ast.JoinedStr) else []
                texts = [str(text.value) for text in spec if isinstance(text, ast.Constant)]
                form = f"{{:{''.join(texts)}}}" if spec else ""
                pieces += [_Hole(ast.unparse(part.value), form), *(["%"] if form.endswith("%}") else [])]
            elif isinstance(part, ast.Constant):
                pieces.append(str(part.value))
        return pieces
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_pieces(node.left), *_pieces(node.right)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
        arguments = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        return _formatted(str(node.left.value), arguments)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        text = node.func.value.value if isinstance(node.func.value, ast.Constant) else None
        return _format_call(text, node) if isinstance(text, str) else [_Hole(ast.unparse(node))]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "round", "float"):
        return [_Hole(ast.unparse(node.args[0]) if node.args else "")]
    return [_Hole(ast.unparse(node))]


def _formatted(text: str, arguments: Sequence[ast.expr]) -> list[Piece]:
    pieces: list[Piece] = []
    left, end = list(arguments), 0
    for match in _PERCENT_FORMAT.finditer(text):
        pieces.append(text[end : match.start()])
        end = match.end()
        if match[0] == "%%":
            pieces.append("%")
        else:
            pieces.append(_Hole(ast.unparse(left.pop(0)) if left else "", match[0]))
    return [*pieces, text[end:]]


def _format_call(text: str, call: ast.Call) -> list[Piece]:
    pieces: list[Piece] = []
    given = list(call.args)
    try:
        for literal, name, spec, _ in Formatter().parse(text):
            pieces.append(literal)
            if name is not None:
                named = _keyword(call, name)
                node = named if named is not None else given.pop(0) if given else None
                pieces.append(_Hole(ast.unparse(node) if node is not None else "", f"{{:{spec}}}" if spec else ""))
                pieces += ["%"] if spec and spec.endswith("%") else []
    except ValueError:
        return []
    return pieces


def _lines(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the printed lines, each with a literal text before and after every value."""
    lines: list[list[Piece]] = [[""]]
    for piece in pieces:
        if isinstance(piece, _Hole):
            lines[-1] += [piece, ""]
            continue
        first, *more = piece.split("\n")
        lines[-1][-1] = f"{lines[-1][-1]}{first}"
        lines += [[text] for text in more]
    return lines


def _metrics_of_line(line: _PrintedLine, printed: Sequence[_PrintedLine], are_whole: bool) -> Iterator[ScriptMetric]:
    """Yield the metrics of a printed line.

    Args:
        printed: all lines.
        are_whole: each of them is a line of output, with nothing before it.
    """
    pieces = line.pieces
    for at in range(1, len(pieces), 2):
        before, hole, after = str(pieces[at - 1]), pieces[at], str(pieces[at + 1])
        assert isinstance(hole, _Hole)
        match = _LABEL.search(before)
        words = match["words"] if match else ""
        whole_words = "".join(str(piece) for piece in pieces[:at:2])
        if match and _is_metric(" ".join(re.split(r"[ /@-]", words)[-2:])):
            label = before[match.start() :]
        elif _is_metric(before) and before.rstrip().endswith((":", "=")):
            label = words = before.lstrip()
            words = _METRIC.search(before)[0] if _METRIC.search(before) else ""  # type: ignore[index]
        elif _is_metric(hole.code) and re.search(r"\w", whole_words):
            # Its text names no metric, its code does: the line as a whole shows the place.
            label = ""
        else:
            continue
        value_at, number, end = at, NUMBER, after
        if label and after.lstrip().startswith("/"):  # 9/10 (90%): the share, not the count
            shares = [i for i in range(at + 2, len(pieces), 2) if str(pieces[i + 1]).lstrip().startswith("%")]
            if not shares:
                continue
            value_at = shares[0]
            between = [r"\S*?" if isinstance(p, _Hole) else _literal(p) for p in pieces[at:value_at]]
            number, end = "".join([*between, NUMBER]), "%"
        elif label and hole.is_bare and not hole.code.endswith(".item()"):
            number = rf"(?:tensor\()?{NUMBER}"
        if label:
            name = _name(words, f"{pieces[0]} {before.removesuffix(label) or label}")
        else:
            name = _name(hole.code.partition("(")[0].removesuffix(".item"), "")
        if end.lstrip().startswith("%"):
            name, number = f"{name}_percent", rf"{number}\s*%"
        short = (r"\b" if label[:1].isalnum() else "") + _literal(label) + number
        long = "".join(_literal(p) if isinstance(p, str) else r".*?" for p in pieces[:at]).removeprefix(r"\s*")
        start = r"^\s*" if are_whole else ""
        candidates = [*([short] if label else []), long + number, start + long + number]
        usable = [each for each in candidates if _finds(each, line, value_at)] or candidates[-1:]
        others = [other for other in printed if other.text != line.text]
        alone = next((each for each in usable if not any(_occurs(each, other) for other in others)), "")
        twins = [other for other in printed if other.text == line.text and other.number != line.number]
        sample = "".join(line.shown(value_at))
        value = re.search(alone or usable[-1], sample)
        yield ScriptMetric(
            name=name,
            pattern=alone or usable[-1],
            line=line.number,
            sample=sample.strip(),
            value=value[1] if value else "",
            is_mixed=not alone or bool(twins) or any(_is_word(p) for p in pieces[:at] if isinstance(p, _Hole)),
        )


def _is_word(hole: _Hole) -> bool:
    """Return whether a value is likely a word that tells phases apart, and not known here."""
    return hole.is_bare and bool(re.search(r"(?i)(phase|split|mode|stage|prefix|tag|desc|subset|name)\W*$", hole.code))


def _finds(pattern: str, line: _PrintedLine, at: int) -> bool:
    """Return whether an expression finds the value at this index of a line, and not another one."""
    texts = line.shown()
    begin = len("".join(texts[:at]))
    match = re.search(pattern, "".join(texts))
    return match is not None and begin <= match.start(1) < begin + len(texts[at])


def _occurs(pattern: str, line: _PrintedLine) -> bool:
    return re.search(pattern, "".join(line.shown())) is not None


def _prints_epoch(line: _PrintedLine) -> bool:
    return any(_finds(EPOCH, line, at) for at in range(1, len(line.pieces), 2))


def _literal(text: str) -> str:
    """Return a regular expression for printed text; numbers may be padded."""
    words = re.split(r"(\s+)", text)
    escaped = "".join(r"\s+" if word.isspace() else re.sub(r"\\([-#&~ ])", r"\1", re.escape(word)) for word in words)
    return re.sub(r"\\s\+$", r"\\s*", escaped)


def _name(words: str, context: str) -> str:
    """Return a metric's name: ``test_loss`` of "Average loss" after "Test set"."""
    parts = [part for part in re.split(r"[\W_]+", words.lower()) if part and not part.isdigit()]
    parts = [_SAME.get(part, part) for part in parts if part not in _FILLERS]
    metric_at = next((i for i, part in enumerate(parts) if _is_metric(part)), 0)
    parts = parts[max(0, metric_at - 1) :][:3]
    if (match := _HELD_OUT.search(context)) and not any(
        p in ("train", "training", "test", "val", "dev") for p in parts
    ):
        held_out = match[1].lower()
        parts.insert(0, _SAME.get(held_out, held_out))
    if _BEST.search(f"{words} {context}") and parts and parts[0] != "best":
        parts.insert(0, "best")
    return "_".join(parts) or "metric"


# ---- guesses


LEARNING_RATE = re.compile(r"(.*_)?(lr|learning_rate)")
BATCH_SIZE = re.compile(r"(?!.*(test|val|eval))(.*_)?(batch_?size|bs|bsz)(_per_\w+)?")
EPOCHS = re.compile(r"(num_|n_|max_|total_|nb_)?(train_|training_)?epochs?")
STEPS = re.compile(r"(num_|n_|max_|total_)(train_|training_)?(steps|iters|iterations)|iters|iterations")
_GUESSES: Sequence[tuple[re.Pattern[str], Any]] = (
    (EPOCHS, 2),
    (STEPS, 100),
    (BATCH_SIZE, 32),
    (LEARNING_RATE, 0.01),
    (re.compile(r"(num_|n_)?(classes|labels|outputs?)|out_.*|output_.*"), 10),
    (re.compile(r"in_channels|channels"), 3),
    (re.compile(r"in_.*|input_.*|num_features"), 32),
    (re.compile(r"hidden.*|width|dim.*|.*_dim|.*d_model|embed.*"), 64),
    (re.compile(r"(num_|n_)?(layers|blocks|heads?)|depth"), 2),
    (re.compile(r"vocab.*"), 1000),
    (re.compile(r"dropout.*"), 0.1),
)


def guess(option: ScriptOption) -> Any:
    """Return a value for an option without a default, by its choices, name and type; None where nothing is likely."""
    if option.choices:
        return option.choices[0]
    for pattern, value in _GUESSES:
        if pattern.fullmatch(option.name.lower()) and option.kind is not bool:
            return option.kind(value) if option.kind in (int, float) else value
    return {int: 1, bool: False}.get(option.kind)
