"""A file's Python as the parser sees it: which names its statements bind, and which they use."""

from __future__ import annotations

import ast
import symtable
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class SourceModule:
    """A file's statements by the names that they bind.

    Attributes:
        label: the file, relative to the study's folder.
        name: as it is imported; empty for the study file.
        bound: name to the statements that bind it.
        aliases: name to what it stands for: a module, or a name in one.
        stars: modules all of whose names are imported.
        rest: statements that bind nothing, and may do anything.
    """

    label: str
    name: str
    tree: ast.Module
    is_package: bool = False
    bound: dict[str, list[ast.stmt]] = field(default_factory=dict)
    aliases: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    rest: list[ast.stmt] = field(default_factory=list)

    def __post_init__(self) -> None:
        for statement in self.tree.body:
            if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
                continue  # what it does as a script
            imported = dict(self.imports_in(statement))
            self.aliases |= imported
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                continue
            names = set(_bound_by(statement))
            for name in names:
                self.bound.setdefault(name, []).append(statement)
            if not names and not imported:
                self.rest.append(statement)

    def imports_in(self, statement: ast.stmt) -> Iterator[tuple[str, tuple[str, str | None]]]:
        """Every alias that imports inside of the statement make."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    yield (alias.asname, (alias.name, None)) if alias.asname else (top, (top, None))
            elif isinstance(node, ast.ImportFrom):
                origin = self._absolute(node)
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append(origin)
                    else:
                        yield alias.asname or alias.name, (origin, alias.name)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        kept = package[: len(package) - node.level + self.is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])


def parsed(source: str) -> ast.Module:
    """Raises SyntaxError or ValueError; of Python's warnings nothing is told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were told when the file was run
        return ast.parse(source)


def is_text(statement: ast.stmt) -> bool:
    """Whether it is a string alone: a docstring."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    """The module's names that a statement binds."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            base: ast.expr = node
            while isinstance(base, (ast.Attribute, ast.Subscript)):
                base = base.value
            if isinstance(base, ast.Name):
                yield base.id  # what `SIZES["hidden"] = 64` changes


def name_chains(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """``("nets", "mlp", "build")`` of ``nets.mlp.build``, of every name in the tree."""

    def walk(node: ast.AST, after: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if isinstance(node, ast.Attribute):
            yield from walk(node.value, (node.attr, *after))
            return
        if isinstance(node, ast.Name):
            yield (node.id, *after)
            return
        for child in ast.iter_child_nodes(node):
            yield from walk(child, ())

    return walk(tree, ())


def global_names(text: str) -> set[str]:
    """The names of its module that a statement uses, in its functions too."""

    def visit(table: symtable.SymbolTable, is_outermost: bool) -> Iterator[str]:
        for symbol in table.get_symbols():
            if is_outermost or symbol.is_global():
                yield symbol.get_name()
        for child in table.get_children():
            yield from visit(child, False)

    return set(visit(symtable.symtable(text, "study", "exec"), True))
