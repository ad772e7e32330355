"""Steps of building the documentation's site (mkdocs.yml): parts that come from the code, and links that leave docs/.

A page holds a marker where a part goes, ``<!-- commands -->``. On GitHub the marker is invisible, and links to files
outside of docs/ open them; on the site, each such file is a page.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the stored studies in tests/

# Files outside of docs/ that are pages of the site.
PAGES = {"CHANGELOG.md": "changelog.md", "benchmarks/README.md": "benchmarks.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", "": "text"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


# ---- parts that come from the code


def commands() -> str:
    """Return the reference of the command line: each command with its arguments, options and examples."""
    import typer

    from raypar.cli.app import app

    group: Any = typer.main.get_command(app)
    return "\n".join(line for words, verb in group.walk() for line in _command(" ".join(words), verb))


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "debug"]
    usage = " ".join(["raypar", name, *(p.metavar or p.name.upper() for p in arguments), "[OPTIONS]"])
    yield from (f"## {name}", "", "```text", usage, "```", "", *_paragraphs(command.help))
    rows = [(f"`{p.metavar or p.name.upper()}`", _text(p.help)) for p in arguments]
    annotations = {name: p.annotation for name, p in inspect.signature(command.callback).parameters.items()}
    panel = None
    for option in options:
        if option.rich_help_panel != panel:
            panel = option.rich_help_panel
            rows.append((f"**{panel}**", ""))
        rows.append((_flags(option, annotations[option.name]), f"{_text(option.help)}{_default(option)}"))
    if rows:
        yield from ("| argument or option | meaning |", "|---|---|", *(f"| {flag} | {text} |" for flag, text in rows))
    yield ""
    if command.epilog:
        yield from ("```sh", *re.split(r" {4,}(?=raypar )", re.sub(r"^Examples?: +", "", command.epilog)), "```", "")


def _flags(option: Any, annotation: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or _kind(annotation)}".replace("|", "\\|")
    return ", ".join(f"`{flag}{value}`" for flag in (*option.opts, *option.secondary_opts))


def _kind(annotation: Any) -> str:
    """Return what stands for a value: ``svg|png`` of a Literal, else the first type's name."""
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(typing.get_args(annotation))
    kinds = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
    return kinds.get(annotation) or next((kind for a in typing.get_args(annotation) if (kind := _kind(a))), "")


def _default(option: Any) -> str:
    if option.is_flag or option.default is None or "(default:" in (option.help or ""):
        return ""
    return f" (default: {option.default})"


def _text(text: str | None) -> str:
    """Return a help text in one line, escaped for a table of Markdown."""
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


def _paragraphs(text: str | None) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", (text or "").strip()):
        yield from (_text(paragraph), "")


def hyperparameters() -> str:
    """Return a table of raypar's own hyperparameters."""
    from raypar.study.options import OPTIONS

    rows = ["| option | default | meaning | strategies |", "|---|---|---|---|"]
    for key, option in OPTIONS.items():
        strategies = ", ".join(f"`{name}`" for name in option.strategies) or "all"
        rows.append(f"| `{key}` | `{option.default!r}` | {_text(option.doc)} | {strategies} |")
    return "\n".join(rows)


def strategies() -> str:
    """Return a table of the strategies."""
    from raypar.study.strategy import STRATEGIES

    rows = ["| `strategy` | what is split | built on | its options |", "|---|---|---|---|"]
    for name, traits in STRATEGIES.items():
        options = ", ".join(f"`{key}`" for key in traits.options)
        rows.append(f"| `{name}` | {traits.splits} | {traits.built_on} | {options} |")
    return "\n".join(rows)


def workloads() -> str:
    """Return a section for each listed workload: what it is, and its own hyperparameters."""
    from raypar.study.workload import Option
    from raypar.workloads import WORKLOADS

    lines = []
    for name, workload in WORKLOADS.items():
        defaults = ", ".join(f"{key}={value!r}" for key, value in workload.defaults.items())
        lines += [f"### {name}", "", f"{workload.description} · {workload.dataset}".strip(" ·"), ""]
        lines += [f"Judged by `{workload.metric_of().name}` ({workload.metric_of().mode}). Defaults: `{defaults}`.", ""]
        if workload.options:
            lines += ["| option | default | meaning |", "|---|---|---|"]
        for key, value in workload.options.items():
            option = value if isinstance(value, Option) else Option(value, type(value), "")
            lines.append(f"| `{key}` | `{option.default!r}` | {_text(option.doc)} |")
        lines.append("")
    return "\n".join(lines)


def gallery() -> str:
    """Return the gallery's entries: each report with one of its figures."""
    from docs.gallery import REPORTS

    lines = []
    for report in REPORTS:
        lines += [f"## {report.title}", "", f"[Open the report](gallery/{report.name}.html). {report.text}", ""]
        lines += [f"[![A figure of the report](gallery/{report.name}.svg)](gallery/{report.name}.html)", ""]
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    f"<!-- {part.__name__} -->": part for part in (commands, hyperparameters, strategies, workloads, gallery)
}


# ---- files


def on_config(config: Any) -> Any:
    """Name anchors as GitHub does."""
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add pages of files outside of docs/, and the gallery's reports."""
    from mkdocs.structure.files import File

    from docs.gallery import reports

    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for path in sorted(linked_files()):
        files.append(File.generated(config, source_page(path), content=_listing(path)))
    for name, content in reports().items():
        files.append(File.generated(config, f"gallery/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the parts that come from the code, and turn links to files outside of docs/ to their pages."""
    for marker, part in PARTS.items():
        if marker in markdown:
            markdown = markdown.replace(marker, part())
    of_page = {site: path for path, site in PAGES.items()}
    path = of_page.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return markdown if page.file.src_uri.startswith("source/") else with_links(markdown, path, page.file.src_uri)


# ---- links


def with_links(markdown: str, path: str, page: str) -> str:
    """Return a file of the repository with its links as they are on its page of the site."""

    def on_site(match: re.Match[str]) -> str:
        return posixpath.relpath(page_of(target(path, match[1])), posixpath.dirname(page) or ".")

    parts = re.split(r"(^```.*?^```|`[^`\n]*`)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else LINK.sub(on_site, part) for number, part in enumerate(parts))


def target(path: str, link: str) -> str:
    """Return the repository's path of what a file links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def page_of(path: str) -> str:
    """Return the site's path of a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else source_page(path)


def source_page(path: str) -> str:
    return f"source/{path}.md"


def linked_files() -> set[str]:
    """Return the files that pages link to, and that are no pages themselves."""
    pages = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))]
    links = {target(path, link) for path in (*pages, *PAGES) for link in links_of(path)}
    return {path for path in links if path not in PAGES and not path.startswith("docs/")}


def links_of(path: str) -> list[str]:
    """Return the links of a file of the repository to other files, without their anchors."""
    return LINK.findall(re.sub(r"^```.*?^```|`[^`\n]*`", "", _read(path), flags=re.MULTILINE | re.DOTALL))


def _listing(path: str) -> str:
    return f"# {path}\n\n```{LANGUAGES.get(Path(path).suffix, 'text')}\n{_read(path)}\n```\n"


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
