"""The layout of a page in a headless Chromium: its width and the size of its letters."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

# The page is a frame of the width of a telephone, since a window cannot be that narrow. Its own
# policy forbids scripts inside it, and this one is around it.
AROUND = """<!DOCTYPE html><body style="margin:0"><script>
function measure(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  page.querySelectorAll("details").forEach(d => d.open = true);
  const letters = [], walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, parent = node.parentElement;
    if (!node.data.trim() || !parent.getClientRects().length) continue;
    const size = parseFloat(page.defaultView.getComputedStyle(parent).fontSize);
    const scale = parent.getScreenCTM ? parent.getScreenCTM().d : 1;
    const turned = parent.getScreenCTM ? Math.hypot(parent.getScreenCTM().b, scale) : 1;
    letters.push([size * turned, node.data.trim().slice(0, 40)]);
  }
  letters.sort((a, b) => a[0] - b[0]);
  const seen = [...page.querySelectorAll("svg")].filter(s => s.getClientRects().length);
  const style = page.defaultView.getComputedStyle(page.body);
  const result = {width: root.scrollWidth, inner: page.defaultView.innerWidth,
    smallest: letters[0], drawings: seen.length,
    widest: Math.max(0, ...seen.map(s => s.getBoundingClientRect().right)),
    paper: style.backgroundColor, ink: style.color};
  const out = document.createElement("pre");
  out.id = "out"; out.textContent = JSON.stringify(result); document.body.append(out);
}
</script><iframe style="border:0" width="%d" height="4000" onload="measure(this)" srcdoc="%s">
</iframe></body>"""


@dataclass(frozen=True)
class Shown:
    """width: of the whole page, inner: of the window; smallest: (pixels, text); widest drawing."""

    width: float
    inner: float
    smallest: tuple[float, str]
    drawings: int
    widest: float
    paper: str
    ink: str


def show(page: str, place: Path, *, width: int = 390, dark: bool = False) -> Shown:
    """Measure a page with all its details open."""
    assert CHROMIUM is not None
    file = place / "around.html"
    file.write_text(AROUND % (width, html.escape(page)), encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=10000", f"--user-data-dir={place / 'profile'}", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (output,) = re.findall(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)
    return Shown(**json.loads(html.unescape(output)))
