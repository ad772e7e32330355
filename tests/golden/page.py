"""A report's page as text with readable diffs: `readable`."""

import json
import re
from html import escape
from html.parser import HTMLParser

MAX_LINE = 110
MAX_FLAT_LINE = 400  # for lists and mappings of plain values
MAX_ROWS = 8
_LEFT_OUT = ("style", "svg")  # layout, and drawings of the figures' specs
_INLINE = (
    "a",
    "code",
    "strong",
    "button",
    "span",
    "em",
    "label",
    "input",
    "wbr",
)  # shown in the line of their element
_VOID = ("meta", "input", "br", "col", "wbr")
# Tags that end an element without an end tag.
_ENDED_BY = {"td": ("td", "th", "tr"), "th": ("td", "th", "tr"), "tr": ("tr",)}
_HASH = re.compile(r"'sha256-[^']+'")


def readable(text):
    """Return the page with one element per line, without scripts, styles and drawings.

    The spec of the first figure is shown as indented JSON; for the others, only the data.
    """
    page = _Page()
    page.feed(text)
    page.close()
    page.end_line()
    return "\n".join(page.lines) + "\n"


def pretty(value, indent=0):
    """Return JSON with each value in one line if it fits."""
    line = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, (dict, list)):
        return line
    heads = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    parts = list(value.values()) if isinstance(value, dict) else value
    is_flat = not any(isinstance(part, (dict, list)) for part in parts)
    if len(line) + indent <= (MAX_FLAT_LINE if is_flat else MAX_LINE):
        return line
    inner = [" " * (indent + 1) + head + pretty(part, indent + 1) for head, part in zip(heads, parts, strict=True)]
    return line[0] + "\n" + ",\n".join(inner) + "\n" + " " * indent + line[-1]


def brief(value):
    """Return a figure's spec with six digits, tables as heads and rows, and only some rows of a long table."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: brief(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) < 2 or not all(isinstance(each, dict) and each.keys() == value[0].keys() for each in value):
        return [brief(each) for each in value]
    every = -(-len(value) // MAX_ROWS)
    rows = [[brief(each) for each in row.values()] for row in value[::every]]
    return {"heads": list(value[0]), "num_rows": len(value), "shown": f"1 of {every}", "rows": rows}


def data_of(node):
    """Yield the data of a figure's spec."""
    if isinstance(node, dict) and "data" in node:
        yield node["data"]["values"]
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from data_of(part)


class _Page(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self._line = ""
        self._open: list[str] = []
        self._skipped = ""  # element whose content is omitted
        self._skipped_depth = 0
        self._is_spec = False
        self._num_specs = 0

    def handle_starttag(self, tag, attrs):
        if self._skipped:
            self._skipped_depth += tag == self._skipped
            return
        if tag in _LEFT_OUT:
            attrs = []
        if tag not in _INLINE:
            self.end_line()
            while self._open and tag in _ENDED_BY.get(self._open[-1], ()):
                self._open.pop()
        attributes = "".join(f" {k}" if v is None else f' {k}="{v}"' for k, v in attrs)
        self._add(f"<{tag}{_HASH.sub('HASH', attributes)}>")
        if tag in _VOID:
            if tag not in _INLINE:
                self.end_line()
            return
        if tag in _LEFT_OUT or (tag == "script" and ("type", "application/json") not in attrs):
            self._skipped, self._skipped_depth = tag, 1
            return
        self._is_spec = tag == "script"
        if tag not in _INLINE:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if self._skipped:
            self._skipped_depth -= tag == self._skipped
            if self._skipped_depth == 0:
                self._skipped = ""
                self._line += f"…</{tag}>"
                self.end_line()
            return
        if tag in _INLINE:
            self._add(f"</{tag}>")
            return
        if not self._line or self._open[-1] != tag:
            self.end_line()
        while self._open.pop() != tag:
            pass
        self._add(f"</{tag}>")
        self.end_line()

    def handle_data(self, data):
        if self._skipped:
            return
        if self._is_spec:
            self._is_spec = False
            self.end_line()
            spec = json.loads(data)
            shown = list(data_of(spec)) if self._num_specs else spec
            self._num_specs += 1
            self.lines += [" " * len(self._open) + line for line in pretty(brief(shown)).splitlines()]
        elif self._open[-1:] == ["code"] or "pre" in self._open:
            self._line += escape(data, quote=False)
        elif text := re.sub(r"[ \n\t]+", " ", data):
            self._add(escape(text if self._line else text.lstrip(" "), quote=False))

    def handle_decl(self, decl):
        self._add(f"<!{decl}>")
        self.end_line()

    def _add(self, text):
        if text:
            self._line = (self._line or " " * len(self._open)) + text

    def end_line(self):
        if self._line.strip():
            self.lines += self._line.replace("\u00a0", "~").rstrip().split("\n")
        self._line = ""
