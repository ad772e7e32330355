"""Markdown of a study's texts: no HTML, no links that run something, everything else as it was."""

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from raypar.markdown import harmless

CHANGED = {
    "a <script>x</script>": "a &lt;script>x&lt;/script>",
    "<!-- x --> <?php": "&lt;!-- x --> &lt;?php",
    "<javascript:alert(1)>": "&lt;javascript:alert(1)>",
    "[x](javascript:alert(1))": r"[x]\(javascript:alert(1))",
    "![x]( JavaScript:alert(1))": r"![x]\( JavaScript:alert(1))",
    "[x](\njavascript:y)": "[x]\\(\njavascript:y)",
    "[x](<data:text/html,y>)": r"[x]\(&lt;data:text/html,y>)",
    "[x](java&#115;cript:y)": r"[x]\(java&#115;cript:y)",
    "[x](javascript&colon;y)": r"[x]\(javascript&colon;y)",
    "[x](javascript\\:y)": r"[x]\(javascript\:y)",
    "[x]: javascript:y": r"[x]\: javascript:y",
    "text\n> - [x\\]]:\n  data:y": "text\n> - [x\\]]\\:\n  data:y",
}
KEPT = (
    "2.00x [1.90, 2.09]: faster, if 3 < 4 and a <- b",
    "[x](https://a.b/c) [y]( HTTP://a.b) ![z](figures/a.png) [t](#top) [u](page.md) [v]()",
    "[x]: https://a.b",
    "`code` **bold** _it_ | cell | &emsp; &lt;",
)


@pytest.mark.parametrize("text", CHANGED)
def test_html_and_links_that_run_something_are_shown_as_text(text):
    assert harmless(text) == CHANGED[text]
    assert harmless(harmless(text)) == harmless(text)


@pytest.mark.parametrize("text", KEPT)
def test_other_markdown_is_unchanged(text):
    assert harmless(text) == text


PIECES = [
    "[",
    "]",
    "(",
    ")",
    "<",
    ">",
    ":",
    "!",
    "\\",
    "\n",
    " ",
    "x",
    "`",
    "javascript:y",
    "data:",
    "https://a.b",
    "&colon;",
]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_a_renderer_finds_no_html_and_no_other_schemes(text):
    renderer = MarkdownIt("commonmark")
    renderer.validateLink = lambda url: True
    pending = renderer.parse(harmless(text))
    while pending:
        token = pending.pop()
        pending += token.children or ()
        assert not token.type.startswith("html"), text
        address = str(token.attrs.get("href") or token.attrs.get("src") or "")
        assert urlsplit(address).scheme in ("", "http", "https") and "javascript" not in address, (text, address)
