"""What a browser would make of an HTML page, as far as tests look at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Page(HTMLParser):
    """What a browser would make of a page, as far as it matters here."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: list[tuple[dict[str, str | None], str]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    texts_by_id: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._inside = ""
        self._id = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self._inside = tag
        self._id = attributes.get("id") or self._id
        if tag == "script":
            self.scripts.append((attributes, ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + data)
        elif self._inside != "style":
            self.text.append(data)
            self.texts_by_id[self._id] = self.texts_by_id.get(self._id, "") + data

    def all_of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def running(self) -> list[str]:
        """The scripts that a browser runs."""
        return [text for attributes, text in self.scripts if attributes.get("type") != "application/json"]

    @property
    def specs(self) -> list[str]:
        return [text for attributes, text in self.scripts if attributes.get("type") == "application/json"]

    @property
    def policy(self) -> str:
        (found,) = [a for a in self.all_of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
        return found["content"] or ""


def page_of(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    return page
