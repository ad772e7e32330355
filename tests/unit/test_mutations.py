"""The mutations of benchmarks/mutations.toml match the code and the tests, and their script works."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mutations(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("mutations")


def test_every_snippet_occurs_once_and_every_listed_test_file_exists(mutations):
    """If this fails after a change or move of the code, update the entry so that it breaks the same behaviour."""
    table = mutations.read_table(ROOT / mutations.TABLE)
    modules = [path.read_text() for path in (ROOT / "raypar").rglob("*.py")]
    assert {m.id: n for m in table if (n := sum(text.count(m.old) for text in modules)) != 1} == {}
    assert {m.id: n for m in table for n in m.tests if not (ROOT / f"tests/{n}.py").is_file()} == {}
    assert len(table) == 50 and all(m.tests and m.old != m.new for m in table)


def test_mutations_are_caught_missed_open_or_unclear(mutations, tmp_path, monkeypatch):
    module = tmp_path / "raypar" / "a.py"
    module.parent.mkdir()
    module.write_text("A = 1\nB = 2\nC = 3\nC = 3\n")

    def run_pytest(root, tests, timeout_s, *flags):
        """Behave as if test_a checked A, test_b checked nothing, and test_c always failed."""
        fails = {"a": "A = 1" not in module.read_text(), "b": False, "c": True}
        failed = [f"tests/test_{key}.py::test_it[1]" for key in fails if fails[key] and f"test_{key}.py" in str(tests)]
        return bool(failed), failed

    monkeypatch.setattr(mutations, "run_pytest", run_pytest)
    verdicts = {}
    for snippet, test in (("A = 1", "a"), ("A = 1", "b"), ("A = 1", "c"), ("C = 3", "a")):
        mutation = mutations.Mutation(snippet + test, "", snippet, "", ())
        verdicts[mutation.id] = mutations.judge(mutation, tmp_path, f"tests/test_{test}.py", timeout_s=60)
    assert [v.state for v in verdicts.values()] == ["caught", "missed", "caught", "open"]
    mutations.confirm(verdicts, tmp_path, timeout_s=60)
    assert [v.state for v in verdicts.values()] == ["caught", "missed", "unclear", "open"]
    assert verdicts["A = 1a"].detail == "tests/test_a.py::test_it[1]"
    assert module.read_text().startswith("A = 1")
