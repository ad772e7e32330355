"""Code keeps to the project's words and sizes; ``python tests/unit/test_style.py`` prints the figures."""

import ast
import re
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MODULES = {
    str(path.relative_to(REPOSITORY)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((REPOSITORY / "raypar").rglob("*.py"))
}
MAX_MODULES_TO_A_STEP = 14
# A docstring opens with an imperative or a noun phrase, not with a relative clause.
RELATIVE = re.compile(r"(What|Whether|Of|How|Which|Where|Who|Whose|When|That)\b")
# Names say what a thing holds, not how it was come by.
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
ON_THE_WAY = ("raypar/study/", "raypar/execution/", "raypar/run/", "raypar/train/", "raypar/parallel/")

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


def modules_with(word):
    return [p for p in MODULES if re.search(rf"\b{word}\b", (REPOSITORY / p).read_text(encoding="utf-8"))]


def test_docstrings_open_with_an_imperative_or_a_noun_phrase():
    assert not relative_docstrings()


def test_names_say_what_they_hold():
    assert not vague_names()


def test_no_two_classes_have_one_name():
    assert not repeated_classes()


def test_a_concept_passes_through_few_modules():
    assert len([p for p in modules_with("batch_size") if p.startswith(ON_THE_WAY)]) <= MAX_MODULES_TO_A_STEP
    assert len(modules_with("num_profiled_steps")) <= 4


def test_comments_and_docs_keep_to_the_words_of_the_field():
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


def test_messages_reports_and_pages_keep_to_the_words_of_the_field():
    assert [f"{where}: {match[0]}" for where, text in messages() if (match := LEFT_COLUMN.search(text))] == []


if __name__ == "__main__":
    lines = {path: len((REPOSITORY / path).read_text(encoding="utf-8").splitlines()) for path in MODULES}
    tests = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in (REPOSITORY / "tests").rglob("*.py"))
    print(f"modules in raypar/: {sum(not path.endswith('__init__.py') for path in MODULES)}")
    print(f"lines in raypar/: {sum(lines.values())}; in tests/: {tests}")
    on_the_way = [p for p in modules_with("batch_size") if p.startswith(ON_THE_WAY)]
    print(f"modules that name batch_size, from file to step: {len(on_the_way)}")
    print(f"modules that name num_profiled_steps: {len(modules_with('num_profiled_steps'))}")
    print(f"classes of one name: {repeated_classes()}")
    print(f"docstrings that open with a relative clause: {len(relative_docstrings())}")
