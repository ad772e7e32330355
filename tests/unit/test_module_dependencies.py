"""Folders import only from earlier ones in a fixed order, and heavy packages have one owner each."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "raypar"
ORDER = "hooks units errors plugins masking markdown files scratch trace signals gpus search_path provenance study "
ORDER += "workloads parallel measure observe train run track analysis predict reporting execution doctor init cli"
ORDER = ORDER.split()
RANK = {name: rank for rank, name in enumerate(ORDER)}
# Folders that may import a package; `train` may import ray.train.
OWNERS = {"ray": ("run", "train", "predict"), "mlflow": ("track",), "typer": ("cli",), "rich": ("reporting", "cli")}
OWNERS |= dict.fromkeys(("pandas", "vl_convert", "jinja2", "markupsafe", "pydantic"), ("reporting",))
OWNERS |= {"torchvision": ("workloads",), "sklearn": ("workloads", "analysis"), "scipy": ("analysis", "predict")}
OWNERS["pandas"] = ("reporting", "analysis")
OWNERS["pynvml"] = ("gpus",)
OWNERS["tensorboardX"] = ("reporting",)
# The one way up: `study.run()` in a notebook, which does what ``raypar study`` does.
DOORS = {("raypar.study.study", "raypar.cli.notebook"), ("raypar.study.study", "raypar.reporting.frame")}
SLOW = ("torch", "ray", "mlflow", "torchvision", "sklearn")
MAY_START_WITH = {"torch": ("measure", "train", "run", "parallel", "predict"), "ray": ("train", "run")}


class Import(NamedTuple):
    """One import; `at_start` is True if it runs when the module is imported."""

    importer: str
    line: int
    name: str
    part: str  # of a module, that is imported; or the module's last name
    at_start: bool
    for_types_only: bool

    @property
    def folder(self):
        return folder_of(self.importer)

    @property
    def top(self):
        return self.name.split(".")[0]

    @property
    def is_run(self):
        """True if it runs with its module, and not for types only."""
        return self.at_start and not self.for_types_only


def folder_of(module):
    """``study`` of ``raypar.study.space``; empty for raypar itself."""
    return [*module.split("."), ""][1]


def name_of(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}


def imports_of(module, parent, at_start=True, types_only=False):
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            is_relative = getattr(node, "level", 0)
            # Modules that run inside a script are imported under another package name.
            assert not is_relative or module.startswith("raypar.observe."), f"{module}:{node.lineno}: relative import"
            base = f"raypar.observe.{node.module or ''}".strip(".") if is_relative else getattr(node, "module", "")
            for alias in node.names:
                dotted = f"{base}.{alias.name}".strip(".")
                name = base if base and dotted not in MODULES else dotted
                yield Import(module, node.lineno, name, alias.name, at_start, types_only)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            yield from imports_of(module, node, at_start and not inside, types_only or is_for_types)


IMPORTS = [i for module, tree in TREES.items() for i in imports_of(module, tree)]
WRONG = {
    "of a folder below": lambda i: (
        i.top == "raypar"
        and RANK.get(folder_of(i.name), 0) > RANK.get(i.folder, len(ORDER))
        and (i.importer, i.name) not in DOORS
    ),
    "of the package itself, but for its version": lambda i: i.name == "raypar" and i.part != "__version__",
    "of more than the events, from run in report": lambda i: (
        i.folder == "reporting" and folder_of(i.name) == "run" and i.name != "raypar.run.runner"
    ),
    "of a heavy package by another than its owner": lambda i: (
        i.folder not in OWNERS.get(i.top, (i.folder,)) and not i.for_types_only
    ),
    "of more than ray.train, from ray in train": lambda i: (
        i.folder == "train" and i.top == "ray" and not i.name.startswith("ray.train")
    ),
    "of what registers the commands, from anywhere": lambda i: i.name.startswith("raypar.cli.app"),
    "of something slow at a module's start": lambda i: (
        i.top in SLOW and i.is_run and i.folder not in MAY_START_WITH.get(i.top, ())
    ),
}


def test_every_folder_has_its_place_in_the_order():
    assert {folder_of(m) for m in MODULES} - {"", *ORDER} == set()


@pytest.mark.parametrize("kind", WRONG)
def test_there_is_no_import(kind):
    assert [f"{i.importer}:{i.line} imports {i.name}" for i in IMPORTS if WRONG[kind](i)] == []


def test_modules_do_not_import_each_other_in_a_circle():
    needs = [(i.importer, i.name) for i in IMPORTS if i.is_run and i.name in MODULES and i.importer != "raypar"]
    of_each = {module: {name for importer, name in needs if importer == module != name} for module in MODULES}
    graphlib.TopologicalSorter(of_each).prepare()  # raises an error that names the circle


VERBS = [f"raypar.cli.{path.stem}" for path in sorted((PACKAGE / "cli").glob("[a-z]*.py"))]


@pytest.mark.parametrize("modules", ["raypar", "raypar.workloads", "raypar.study.loader", ", ".join(VERBS)])
def test_common_imports_are_fast(modules):
    code = f"import sys, {modules}; raypar.load; from raypar.study.options import OPTIONS; dict(OPTIONS); "
    code += f"print({{'pandas', 'pyarrow', *{SLOW!r}}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_listing_commands_imports_none_of_them():
    code = "import sys; from raypar.cli.app import app; app(['--help'], standalone_mode=False); "
    code += "assert not {'raypar.cli.study', 'raypar.cli.recommend', 'raypar.cli.store'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_has_a_docstring(module):
    assert not TREES[module].body or ast.get_docstring(TREES[module])
