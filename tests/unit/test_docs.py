"""Checks of the documentation without building it: links, navigation, commands, messages, output, paths."""

import ast
import contextlib
import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml
from command import GROUPS, VERBS
from typer.testing import CliRunner

import raypar
from raypar.cli.app import app
from raypar.study.study import Study
from tests.golden import COMMANDS, HERE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FILES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ("README.md", "AGENTS.md"))]
LINKED = [*FILES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
TEXTS = {path: path.read_text(encoding="utf-8") for path in LINKED}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
CODE = re.compile(r"^```.*?^```|(?<!`)`[^`\n]+`(?!`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]*)#?([^)\s]*)\)")
USAGE_ERROR = typer.BadParameter.__mro__[1]  # typer doesn't export it
GROUP = typer.main.get_command(app)
BY_LAST_WORD = {verb.split()[-1]: verb for verb in reversed(VERBS)}
OTHERS_FLAGS = {"--hypothesis-profile", "--no-restart", "--node-ip-address", "--quick", "--shm-size", "--torch-backend"}
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
each_linked = pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))


def module(name):
    spec = importlib.util.spec_from_file_location(f"{name}_of_docs", DOCS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


HOOKS = module("hooks")


# ---- links


def anchors(text):
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ +(.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h)).lower().replace(" ", "-") for h in headings
    }


@each_linked
def test_links_resolve(path):
    broken = []
    for name, anchor in LINK.findall(CODE.sub("", TEXTS[path])):
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            broken.append(name)
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            broken.append(f"{name}#{anchor}")
    assert broken == []


def test_every_page_is_in_the_navigation():
    def pages(entry):
        return [entry] if isinstance(entry, str) else [page for each in entry for page in pages(each)]

    def entries(nav):
        return [value if isinstance(value, str) else entries(value) for each in nav for value in each.values()]

    listed = pages(entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(listed) == sorted([*(path.name for path in DOCS.glob("*.md")), *HOOKS.PAGES.values()])


def test_links_out_of_the_docs_resolve_on_the_site():
    site = {path.name for path in DOCS.iterdir()} | {*HOOKS.PAGES.values()}
    site |= {HOOKS.source_page(path) for path in HOOKS.linked_files()}
    pages = {f"docs/{path.name}": path.name for path in DOCS.glob("*.md")} | HOOKS.PAGES
    for path, page in pages.items():
        text = HOOKS.with_links((ROOT / path).read_text(encoding="utf-8"), path, page)
        assert {name for name, _ in LINK.findall(CODE.sub("", text)) if name} <= site
    assert HOOKS.with_links("[a](../CHANGELOG.md#x) `[b](c)`", "docs/a.md", "a.md") == "[a](changelog.md#x) `[b](c)`"
    assert HOOKS.with_links("[a](../docs/b.md)", "benchmarks/README.md", "benchmarks.md") == "[a](b.md)"


# ---- commands


def command_lines(text):
    """Yield every ``raypar …`` in the code of a page."""
    lines = [line for _, block in BLOCK.findall(text) for line in block.splitlines()]
    spans = [" ".join(span.split()) for span in SPAN.findall(BLOCK.sub("", text))]
    for line in [*lines, *spans]:
        if match := re.match(r"(?:\$ |\.venv/bin/)?raypar +(\S.*)", line):
            yield match[1]


def words_of(line):
    words = []
    for word in shlex.split(line, comments=True):
        if word[0] in ">|&;":
            break
        if word not in ("…", "..."):
            words.append(word)
    return words


def mistake(line):
    """Return the mistake in a command line (verb, flag, too many arguments), or None."""
    verb, *words = words_of(line) or ["--help"]
    if verb.startswith("-"):
        return None if verb in {flag for p in GROUP.params for flag in p.opts} | {"--help"} else "no such flag"
    if verb.isupper():  # a placeholder
        return None
    if verb == "demo" and words:
        verb, *words = [BY_LAST_WORD.get(words[0], ""), "quickstart", *words[1:]]
    elif verb in GROUPS and words:
        verb, *words = [f"{verb} {words[0]}", *words[1:]]
    if verb not in VERBS:
        return "no such command"
    command = VERBS[verb]
    try:
        parser = command.make_parser(typer.Context(command, info_name=verb))
        _, rest, _ = parser.parse_args([word for word in words if word != "--help"])
    except USAGE_ERROR as error:
        return error.format_message()
    return f"too many arguments: {rest}" if rest else None


@each_linked
def test_commands_parse(path):
    wrong = {line: what for line in command_lines(TEXTS[path]) if (what := mistake(line))}
    assert wrong == {}


@each_file
def test_flags_exist(path):
    every = {flag for c in VERBS.values() for p in c.params for flag in (*p.opts, *p.secondary_opts)}
    spans = SPAN.findall(BLOCK.sub("", TEXTS[path]))
    flags = {match[0] for span in spans if (match := re.match(r"--[a-z][a-z-]*", span))}
    assert flags <= every | OTHERS_FLAGS | {"--help"}


def test_the_reference_of_commands_is_complete_and_its_examples_parse():
    text = HOOKS.commands()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == list(VERBS)
    for name, command in VERBS.items():
        section = text.split(f"## {name}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "debug":
                assert f"`{parameter.opts[0]}" in section
    lines = [line for line in command_lines(text) if "[OPTIONS]" not in line]
    assert {line: what for line in lines if (what := mistake(line))} == {}


def test_a_command_is_listed_with_the_first_line_of_its_functions_description():
    for name, verb in VERBS.items():
        first, _, _ = inspect.getdoc(inspect.unwrap(verb.callback)).partition("\n\n")
        assert verb.short_help == first, name


def test_the_reference_of_python_is_complete():
    names = re.findall(r"^::: raypar\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(names) == sorted(raypar.__all__)
    assert "`num_workers`" in HOOKS.hyperparameters()
    assert re.findall(r"^### (\w+)$", HOOKS.workloads(), re.MULTILINE) == raypar.workloads.__all__


# ---- messages


def templates():
    """Yield every string of raypar's code, with … for placeholders."""
    for path in sorted((ROOT / "raypar").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                yield re.sub("…( ?…)+", "…", text)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.replace("{}", "…")


OTHERS_MESSAGES = ["operator torchvision::nms does not exist"]  # torch's


def test_explained_messages_are_in_the_code():
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [message for _, message in re.findall(r"^### (`{1,2})(.*)\1$", text, re.MULTILINE)]
    assert len(quoted) > 50 and len(set(quoted)) == len(quoted)
    # A caveat is built of parts: its subject, its values, the rest.
    parts = {message: [part.strip(" .,)") for part in re.split("[…:(]", message)] for message in quoted}
    code = "\n".join(templates())
    missing = [message for message, texts in parts.items() if not all(text in code for text in texts)]
    assert missing == OTHERS_MESSAGES


SOUGHT = {"store_faults.py": ("not in the store yet",), "faults.py": ("starting a gang",)}
SOUGHT |= {"contradictions.py": ("is the fastest:", "too close to call", "Recommended: ", "Leading: ")}


@pytest.mark.parametrize("benchmark", SOUGHT)
def test_messages_that_a_benchmark_looks_for_are_in_the_code(benchmark):
    source = (ROOT / "benchmarks" / benchmark).read_text(encoding="utf-8")
    code = "\n".join(templates())
    for text in SOUGHT[benchmark]:
        assert text.strip() in source and text in code


# ---- output, examples and paths


def tutorial_study():
    (study,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "tutorial.md").read_text(encoding="utf-8"), re.M | re.S)
    return study


def test_the_tutorials_study_is_valid():
    names = {}
    exec(compile(tutorial_study(), "tutorial.md", "exec"), names)
    assert isinstance(names["study"], Study) and len(names["study"].points()) == 6


@each_file
def test_output_is_what_the_command_prints(path, tmp_path):
    golden = {args: HERE / name for name, args in COMMANDS.items()}
    for _, block in BLOCK.findall(TEXTS[path]):
        if not block.startswith("$ raypar "):
            continue
        command, _, shown = block.partition("\n")
        words = tuple(shlex.split(command)[2:])
        if words in golden:
            printed = golden[words].read_text(encoding="utf-8")
        else:
            (tmp_path / "mnist.py").write_text(tutorial_study(), encoding="utf-8")
            with contextlib.chdir(tmp_path):
                done = CliRunner().invoke(app, words)
            printed = done.stdout + done.stderr
        position = 0
        for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
            assert part in printed[position:], command
            position = printed.index(part, position) + len(part)


@each_file
def test_paths_exist(path):
    spans = [*SPAN.findall(BLOCK.sub("", TEXTS[path])), *(b for _, b in BLOCK.findall(TEXTS[path]))]
    named = re.findall(r"(?<![\w/.~])(?:raypar|tests|studies|benchmarks|docs)/[\w/.-]*\w", " ".join(spans))
    assert [name for name in named if not re.search("NAME|STUDY", name) and not (ROOT / name).exists()] == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    made = [target for span in spans for target in re.findall(r"(?:^|\n)make ([a-z-]+)", span)]
    assert set(made) <= set(targets)


def test_the_gallery_has_a_page_and_a_picture_of_each_report():
    gallery = module("gallery")
    files = gallery.reports()
    assert sorted(files) == sorted(f"{report.name}.{kind}" for report in gallery.REPORTS for kind in ("html", "svg"))
    for name, text in files.items():
        assert text.startswith("<svg" if name.endswith("svg") else "<!doctype html>"), name
