"""The camera of docs/report.png: what Chromium draws of a page is what lands in the file."""

import shutil
from pathlib import Path

import pytest
from draw_report import SIZE, photograph
from PIL import Image

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium (Debian: apt-get install chromium)"),
]
PAGE = """<!doctype html><style>html {background: rgb(10, 120, 30)}</style>
<script>document.addEventListener("DOMContentLoaded",
 () => setTimeout(() => document.body.innerHTML = "<div style='position: fixed; inset: 0 auto auto 0; width: 50px; "
 + "height: 50px; background: rgb(200, 0, 0)'></div>", 300))</script><body></body>"""


def test_the_picture_is_the_top_of_the_page_after_its_scripts(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(PAGE)
    picture.write_bytes(b"an older picture")
    photograph(page, picture)
    with Image.open(picture) as drawn:
        assert drawn.size == SIZE
        pixels = drawn.convert("RGB")
        assert pixels.getpixel((25, 25)) == (200, 0, 0)
        assert pixels.getpixel((SIZE[0] - 1, SIZE[1] - 1)) == (10, 120, 30)


def test_without_a_browser_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="needs Chromium"):
        photograph(tmp_path / "page.html", tmp_path / "page.png")
