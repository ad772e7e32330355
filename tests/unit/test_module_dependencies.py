"""The folders' order of DESIGN: each imports only what stands above it, and heavy packages have one owner."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "raypar"
ORDER = (
    "errors",
    "units",
    "masking",
    "fsync",
    "trace",
    "signals",
    "provenance",
    "study",
    "workloads",
    "parallel",
    "train",
    "run",
    "track",
    "analysis",
    "predict",
    "report",
    "execution",
    "doctor",
    "cli",
)
RANK = {name: rank for rank, name in enumerate(ORDER)}
# Who may import a package, at any place; ray.train is also train's.
OWNERS = {
    "ray": ("run", "train", "predict"),
    "mlflow": ("track",),
    "typer": ("cli",),
    "rich": ("report", "cli"),
    "pandas": ("report",),
    "vl_convert": ("report",),
    "jinja2": ("report",),
    "markupsafe": ("report",),
    "scipy": ("analysis", "predict"),
    "torchvision": ("workloads",),
    "sklearn": ("workloads",),
    "pynvml": ("train",),
}
SLOW = ("torch", "ray", "mlflow", "torchvision", "sklearn")
MAY_START_WITH = {"torch": ("train", "run", "parallel", "predict"), "ray": ("train", "run")}


@dataclass(frozen=True)
class Import:
    """One import statement: from where, of what, and whether it runs when the module is imported."""

    importer: str
    line: int
    name: str
    at_start: bool
    for_types_only: bool

    @property
    def folder(self) -> str:
        return folder_of(self.importer)

    @property
    def top(self) -> str:
        return self.name.split(".")[0]

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name}"


def folder_of(module: str) -> str:
    """``study`` of ``raypar.study.space``; empty for raypar itself."""
    return [*module.split("."), ""][1]


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports_of(module: str) -> Iterator[Import]:
    def walk(body: list[ast.stmt], at_start: bool, types_only: bool) -> Iterator[Import]:
        for node in body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(module, node.lineno, alias.name, at_start, types_only)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module}:{node.lineno}: relative import"
                for alias in node.names:
                    dotted = f"{node.module}.{alias.name}"
                    name = dotted if dotted in MODULES else str(node.module)
                    yield Import(module, node.lineno, name, at_start, types_only)
            else:
                inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                types = types_only or is_type_checking(node)
                for field in ("body", "orelse", "finalbody"):
                    yield from walk(getattr(node, field, []), at_start and not inside, types)
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body, at_start, types)
                for case in getattr(node, "cases", []):
                    yield from walk(case.body, at_start, types)

    return walk(ast.parse(MODULES[module].read_text(encoding="utf-8")).body, True, False)


IMPORTS = [i for module in MODULES for i in imports_of(module)]
OWN = [i for i in IMPORTS if i.top == "raypar"]
FOREIGN = [i for i in IMPORTS if i.top != "raypar"]


def told(wrong: list[Import]) -> str:
    return "\n".join(map(str, wrong))


def test_every_folder_has_its_place_in_the_order() -> None:
    assert {folder_of(m) for m in MODULES} - {"", *ORDER} == set()


def test_a_folder_imports_only_what_stands_above_it() -> None:
    placed = [i for i in OWN if i.folder in RANK and folder_of(i.name) in RANK]
    wrong = [i for i in placed if RANK[i.folder] < RANK[folder_of(i.name)]]
    assert not wrong, told(wrong)


def test_nothing_inside_imports_the_package_itself_but_for_its_version() -> None:
    wrong = []
    for module in MODULES:
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            if isinstance(node, ast.ImportFrom) and node.module == "raypar":
                wrong += [f"{module}: {n}" for n in names if f"raypar.{n}" not in MODULES and n != "__version__"]
    assert not wrong, wrong


def test_reports_take_only_the_events_from_run() -> None:
    wrong = [i for i in OWN if i.folder == "report" and folder_of(i.name) == "run" and i.name != "raypar.run.runner"]
    assert not wrong, told(wrong)


@pytest.mark.parametrize("package", sorted(OWNERS))
def test_a_heavy_package_is_imported_by_its_owner_alone(package: str) -> None:
    wrong = [i for i in FOREIGN if i.top == package and i.folder not in OWNERS[package] and not i.for_types_only]
    assert not wrong, told(wrong)


def test_train_takes_only_the_training_part_of_ray() -> None:
    wrong = [i for i in FOREIGN if i.folder == "train" and i.top == "ray" and not i.name.startswith("ray.train")]
    assert not wrong, told(wrong)


def test_nothing_slow_is_imported_at_the_start_of_a_module_outside_of_train_and_run() -> None:
    wrong = [
        i
        for i in FOREIGN
        if i.top in SLOW and i.at_start and not i.for_types_only and i.folder not in MAY_START_WITH.get(i.top, ())
    ]
    assert not wrong, told(wrong)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    needs: dict[str, set[str]] = {module: set() for module in MODULES}
    for i in OWN:
        if i.at_start and not i.for_types_only and i.name in MODULES and i.importer != "raypar":
            needs[i.importer].add(i.name)
    settled: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module not in settled:
            for needed in sorted(needs[module] - {module}):
                visit(needed, (*path, module))
            settled.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", ["raypar", "raypar.workloads", "raypar.study.loader", "raypar.cli.app"])
def test_what_every_command_imports_brings_nothing_slow(module: str) -> None:
    code = f"import sys, {module}; print(set({SLOW!r}) & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_says_what_it_is_for(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text))
