"""Write all pages and plots from bench/results/*.json: python bench/readme.py.

These are the pages of bench/pages.py, and the figures of README.md, of docs/maintainers/all_gather_matmul_study.md, and
of pages for users (bench/ratios.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aims
import head_to_head
import layers_beside
import pages
import ratios
import study
from tables import OVERLAP, ROOT, load, names

from moecomm_bench import beside
from moecomm_bench.plot import draw

BEGIN, END = "<!-- figures: written by bench/readme.py -->", "<!-- end of figures -->"
# Results with pictures besides sweeps and those with other libraries.
PICTURES = ("ll-h200-4", "latency-backends-h100-4", "backends-domains-h100-4", "domain-counts-h100-4")


def headlines() -> str:
    """Return the figures of README."""
    return "\n\n".join([*layers_beside.front(), *head_to_head.front()])


def is_sweep(found: dict[str, Any]) -> bool:
    """Return True if a result has enough sizes to be drawn."""
    return found.get("benchmark") == "dispatch-combine" and len(found["case"]["tokens"]) > 4


def drawn() -> dict[Path, list[Path]]:
    """Return the pictures of the pages, and the results that each is drawn from."""
    folder = ROOT / "bench" / "results"
    alone = [name for name in names() if is_sweep(load(name)) or beside.has_peers(load(name))]
    of_pictures = {name: (name,) for name in (*alone, *PICTURES)} | {"overlap-h100-2": OVERLAP}
    return {
        folder / f"{picture}.svg": [folder / f"{name}.json" for name in found] for picture, found in of_pictures.items()
    }


def filled(page: str, figures: str) -> str:
    """Return a page with its current figures."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert len(pattern.findall(page)) == 1, "the page has no place for figures, or several"
    return pattern.sub(lambda _: f"{BEGIN}\n{figures}\n{END}", page)


def blocks() -> dict[Path, Callable[[], str]]:
    """Return what makes the figures of each page that is otherwise written by hand."""
    return {ROOT / "README.md": headlines, study.PAGE: study.figures, **ratios.FIGURES}


def write_pages() -> None:
    """Write the pages of bench/pages.py, the figures between marks on other pages, and the marks of bench/aims.py."""
    for path, figures in blocks().items():
        path.write_text(filled(path.read_text(), figures()))
    for path, content in (pages.pages() | {aims.PAGE: aims.marked(aims.PAGE.read_text())}).items():
        path.write_text(content)


if __name__ == "__main__":
    for picture, drawn_from in drawn().items():
        draw(drawn_from, picture)
    write_pages()
