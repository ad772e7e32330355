"""What tests see pages with: it must see what is wrong with a page, or those tests prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import browser

PAGE = """<!doctype html><title>one</title><p id="late">early</p><p hidden>unseen</p><button>press</button>
<style>@media (prefers-color-scheme: dark) { p { color: rgb(1, 2, 3) } }</style>
<script>
setTimeout(() => { document.getElementById("late").textContent = "late ≥ 1"; throw new Error("thrown") }, 50);
document.querySelector("button").onclick = () => { document.title = "pressed" };
console.error("said");
</script>"""


def test_a_page_is_run_read_pressed_and_pictured(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    with browser() as chromium:
        page = chromium.open(tmp_path / "page.html")
        page.until("document.getElementById('late').textContent.startsWith('late')")
        assert "late ≥ 1" in page.text() and "unseen" not in page.text() and "unseen" in page.html()
        page.click("button")
        assert page.run("document.title") == "pressed"
        assert any("said" in error for error in page.errors) and any("thrown" in error for error in page.errors)
        assert page.requests == [(tmp_path / "page.html").as_uri()]
        page.resize(400, 700)
        page.emulate(prefers_color_scheme="dark")
        assert page.run("[innerWidth, getComputedStyle(document.querySelector('p')).color]") == [400, "rgb(1, 2, 3)"]
        assert page.screenshot(tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(AssertionError, match="nowhere"):
            page.run("nowhere.to.be.found")
        with pytest.raises(AssertionError, match="still not"):
            page.until("false", timeout_s=0.2)
