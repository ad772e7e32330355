"""``python -m tests.golden``: rewrite the golden files."""

from . import HERE, outputs

for name, text in outputs():
    path = HERE / name
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        print(f"changed: {name}")
