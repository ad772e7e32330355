"""Code, messages and docs keep to the project's words."""

import ast
import re
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MODULES = {
    str(path.relative_to(REPOSITORY)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((REPOSITORY / "raypar").rglob("*.py"))
}
# A docstring opens with an imperative or a noun phrase, not with a relative clause.
RELATIVE = re.compile(r"(What|Whether|Of|How|Which|Where|Who|Whose|When|That)\b")
# Names say what a thing holds, not where it came from.
VAGUE = re.compile(r"_*(found|told|known|own|said|wanted|mended)")
DIALECT = re.compile(r"\b(mend(ed|s)?|amiss|manieth|way out|ways out|(is|are|was) told)\b")
# The left column of the table of words: not in what people read.
LEFT_COLUMN = re.compile(
    r"\b(told|tells?|says|by more than chance|by one trial|best so far|ways? out|amiss|mend(s|ed)?|left out|set aside"
    r"|asked last|not to be had|gone|wants|what each hyperparameter does|at equal values of the others"
    r"|as fast as \d)\b",
    re.IGNORECASE,
)
READ = (".txt", ".md", ".html", ".csv", ".jinja", ".js")

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions():
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, Definition):
                yield f"{path}:{getattr(node, 'lineno', 1)}", node


def relative_docstrings():
    return [where for where, node in definitions() if RELATIVE.match(ast.get_docstring(node) or "")]


def vague_names():
    places = []
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = node.name
            else:
                continue
            if VAGUE.fullmatch(name):
                places.append(f"{path}:{node.lineno}: {name}")
    return places


def repeated_classes():
    counts = Counter(node.name for _, node in definitions() if isinstance(node, ast.ClassDef))
    return [name for name, count in counts.items() if count > 1]


def test_docstrings_open_with_an_imperative_or_a_noun_phrase():
    assert not relative_docstrings()


def test_names_are_not_vague():
    assert not vague_names()


def test_class_names_are_unique():
    assert not repeated_classes()


def test_comments_and_docs_use_common_words():
    files = [
        *MODULES,
        *(str(p.relative_to(REPOSITORY)) for p in REPOSITORY.glob("docs/*.md")),
        "README.md",
        "CHANGELOG.md",
    ]
    wrong = [
        f"{path}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate((REPOSITORY / path).read_text(encoding="utf-8").splitlines(), 1)
        if DIALECT.search(line)
    ]
    assert not wrong


def messages():
    """Return the strings of the code, without docstrings, and the lines of templates and of what people have read."""
    docstrings = {id(node.body[0].value) for _, node in definitions() if ast.get_docstring(node) is not None}
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield f"{path}:{node.lineno}", node.value
    for folder in ("raypar", "tests/golden"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix in READ:
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                    yield f"{path.relative_to(REPOSITORY)}:{number}", line


def test_messages_reports_and_pages_use_common_words():
    assert [f"{where}: {match[0]}" for where, text in messages() if (match := LEFT_COLUMN.search(text))] == []
