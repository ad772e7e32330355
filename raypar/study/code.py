"""Which of a user's code a study's workload leads to, and what of it has changed.

A trial's identity holds its settings, not the functions that it ran: those are compared on their own. What counts is
what the workload names, and what that names in turn, in the study file and in modules beside it; as the parser sees
it, so that comments, docstrings and formatting are nothing. Installed packages are told apart by their versions
(`raypar.provenance`), and what code computes or imports at run time by names of its own making is not seen.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from raypar.study.source import SourceModule, global_names, is_text, name_chains, parsed

MAX_PARTS = 64  # more are told file by file: every trial's result carries them
MAX_NAMED = 4
OUTSIDE = "outside of functions"


# What a study declares; its trials' identities hold what of it matters to them.
_SETTINGS = {
    *("space", "baseline", "num_repeats", "config", "seed", "max_retries", "num_trials", "searcher", "scheduler"),
    *("max_concurrent_trials", "price_per_node_hour"),
}
_ALSO_OF_A_STUDY = {"name", "metric", "mode", "description"}


def code_of(path: Path, source: str) -> dict[str, str]:
    """Each function, class and value that the study's workload leads to, with a digest of 12 hex digits.

    The keys are ``file: name``, the file relative to the study's folder. Of more than `MAX_PARTS`, one for each file.

    Args:
        path: the study file, whose text is `source`; what it imports is looked for in its folder.
    """
    try:
        parts = _Reached(path.resolve().parent).of_study(SourceModule(path.name, "", parsed(source)))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):  # a module beside it, or nested too deeply
        return {path.name: _digest(source)}
    if len(parts) <= MAX_PARTS:
        return parts
    by_file: dict[str, list[str]] = {}
    for key, digest in parts.items():
        by_file.setdefault(key.partition(": ")[0], []).append(f"{key} {digest}")
    return {file: _digest("\n".join(sorted(own))) for file, own in by_file.items()}


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """What the two have not alike, in order; nothing where either is not known."""
    if not one or not other:
        return ()
    return tuple(sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)))


def listed(parts: Iterable[str]) -> str:
    """``build_model and HIDDEN in s.py, Net in nets.py``; of many the first, and how many more there are."""
    names = sorted(set(parts))
    by_file: dict[str, list[str]] = {}
    for part in names[:MAX_NAMED]:
        file, _, name = part.partition(": ")
        by_file.setdefault(file, []).append(name)
    told = [f"{' and '.join(filter(None, [', '.join(own[:-1]), own[-1]]))} in {file}" for file, own in by_file.items()]
    told = [text.removeprefix(" in ") for text in told]  # a file as a whole
    more = len(names) - MAX_NAMED
    return ", ".join(told) + (f" and {more} more" if more > 0 else "")


class _Reached:
    """Follows names from a study's workload through the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, SourceModule | None] = {}
        self._seen: set[tuple[str, str]] = set()
        self._texts: dict[str, list[str]] = {}

    def of_study(self, file: SourceModule) -> dict[str, str]:
        roots = file.bound.get("study") or [s for s in file.tree.body if _declares(s)]
        for statement in roots:
            self._texts.setdefault(f"{file.label}: study", []).append(self._follow(file, statement))
        if not roots:
            self._all_of(file)
        self._rest_of(file)
        return {key: _digest("\n".join(texts)) for key, texts in sorted(self._texts.items())}

    def _name(self, module: SourceModule, name: str) -> None:
        if (module.label, name) in self._seen:
            return
        self._seen.add((module.label, name))
        for statement in module.bound.get(name, ()):
            text = self._follow(module, statement)
            self._texts.setdefault(f"{module.label}: {name}", []).append(text)
        if name in module.bound:
            return
        if (alias := module.aliases.get(name)) is not None:
            self._alias(alias, ())
        else:
            for star in module.stars:
                if (other := self._module(star)) is not None:
                    self._name(other, name)

    def _follow(self, module: SourceModule, statement: ast.stmt) -> str:
        """Go on with what a statement names; its text, with what its names are imported from."""
        tree = _Essential().visit(ast.parse(ast.unparse(statement)))
        text = ast.unparse(tree)
        aliases = {**module.aliases, **dict(module.imports_in(statement))}
        chains = dict.fromkeys(name_chains(tree))
        inner = {alias for alias, _ in module.imports_in(statement)}
        wanted = global_names(text) | inner
        imported = set()
        for name, *attributes in chains:
            if name not in wanted:
                continue
            if name in aliases:
                imported.add(f"{name} = {aliases[name]}")
                self._alias(aliases[name], attributes)
            if name in module.bound or name not in aliases:
                self._name(module, name)
        return "\n".join([text, *sorted(imported)])

    def _alias(self, alias: tuple[str, str | None], attributes: Sequence[str]) -> None:
        """Go on with ``alias.attribute.attribute``, as far as that lies in the folder."""
        origin, name = alias
        rest = [*([name] if name else []), *attributes]
        module = self._module(origin)
        while rest and (inside := self._module(f"{origin}.{rest[0]}")) is not None:
            origin, module, rest = f"{origin}.{rest[0]}", inside, rest[1:]
        if module is None:
            return
        self._rest_of(module)
        if rest:
            self._name(module, rest[0])
        else:
            self._all_of(module)

    def _all_of(self, module: SourceModule) -> None:
        for name in module.bound:
            self._name(module, name)

    def _rest_of(self, module: SourceModule) -> None:
        if (module.label, "") not in self._seen:
            self._seen.add((module.label, ""))
            for statement in module.rest:
                if not is_text(statement):
                    self._texts.setdefault(f"{module.label}: {OUTSIDE}", []).append(self._follow(module, statement))

    def _module(self, name: str) -> SourceModule | None:
        """The module of this name in the folder; None where it is elsewhere."""
        if name not in self._modules:
            self._modules[name] = None
            parts = name.split(".")
            if parts[0] == "raypar":
                return None
            stem = self._folder.joinpath(*parts)
            for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")) if all(parts) else ():
                if file.is_file():
                    label = file.relative_to(self._folder).as_posix()
                    tree = parsed(file.read_text(encoding="utf-8-sig"))
                    self._modules[name] = SourceModule(label, name, tree, file.name == "__init__.py")
                    break
        return self._modules[name]


class _Essential(ast.NodeTransformer):
    """Without docstrings, and without what a study says beside its workload."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        apart = {"Study": _SETTINGS | _ALSO_OF_A_STUDY, "replace": _SETTINGS, "Workload": {"description"}}
        node.keywords = [k for k in node.keywords if k.arg not in apart.get(called, ())]
        return node

    def _without_docstring(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        if is_text(node.body[0]):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _without_docstring


def _declares(statement: ast.stmt) -> bool:
    """Whether the statement makes a Study, other than in a function."""
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return not isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and any(
        "Study" in (getattr(called, "id", ""), getattr(called, "attr", "")) for called in calls
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
