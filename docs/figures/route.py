"""Draws the route of a token from its source rank to its experts and back: python docs/figures/route.py"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE))

from canvas import INK, RANKS, Canvas  # noqa: E402 - beside this file, which is not a package

SOURCE, FIRST, SECOND = RANKS[0], RANKS[1], RANKS[2]
COLUMNS = {"dispatch": 255, "experts": 505, "combine": 745}


def rank_frame(canvas: Canvas, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """The border of a rank, with its name."""
    canvas.box(x, y, width, height, stroke=color)
    canvas.text(x + 14, y + 24, text, color=color, bold=True)


def expert_lane(canvas: Canvas, y: float, expert: int, color: str) -> None:
    """A row of token 7 in the group of an expert, and what the expert makes of it."""
    canvas.label(375, y, 112, 30, f"x: row of e{expert}", color)
    canvas.path(f"M491 {y + 15:g} L519 {y + 15:g}")
    canvas.label(523, y, 92, 30, f"expert {expert}", color)
    canvas.path(f"M619 {y + 15:g} L647 {y + 15:g}")
    canvas.label(651, y, 44, 30, f"y{expert}", color)


def draw() -> str:
    """Token 7 of rank 0 picks experts 2 and 3 of rank 1, and expert 6 of rank 3."""
    canvas = Canvas(1126, 396, "The route of a token: source rank, dispatch, expert GEMMs, combine, source rank")
    for text, x in COLUMNS.items():
        canvas.text(x, 28, {"experts": "expert GEMMs"}.get(text, text), size=17, anchor="middle", bold=True)

    rank_frame(canvas, 10, 110, 186, 176, "rank 0: source rank", SOURCE)
    canvas.label(24, 150, 158, 34, "token 7: row of x", SOURCE)
    canvas.text(24, 212, "topk_idx  [2, 3, 6]")
    canvas.text(24, 236, "topk_weights")
    canvas.text(24, 256, "[w2, w3, w6]")

    rank_frame(canvas, 355, 52, 490, 160, "rank 1: owns experts 2 and 3", FIRST)
    expert_lane(canvas, 94, 2, FIRST)
    expert_lane(canvas, 158, 3, FIRST)
    canvas.path("M431 126 L431 156")
    canvas.text(440, 146, "local copy", size=12)
    canvas.path("M699 109 C722 109 722 132 738 137")
    canvas.path("M699 173 C722 173 722 146 738 141")
    canvas.label(742, 122, 92, 34, "reduced row", FIRST, size=12)
    canvas.text(788, 176, "w2 y2 + w3 y3", size=12, anchor="middle")
    canvas.text(788, 193, "float32", size=12, anchor="middle")

    rank_frame(canvas, 355, 238, 490, 100, "rank 3: owns experts 6 and 7", SECOND)
    expert_lane(canvas, 280, 6, SECOND)
    canvas.path("M699 295 L738 295")
    canvas.label(742, 278, 92, 34, "reduced row", SECOND, size=12)
    canvas.text(788, 330, "w6 y6", size=12, anchor="middle")

    canvas.path("M198 158 C262 150 290 112 371 109", color=SOURCE, width=2.5)
    canvas.path("M198 176 C262 186 290 290 371 295", color=SOURCE, width=2.5)
    canvas.text(268, 74, "one copy of the row", size=12, anchor="middle")
    canvas.text(268, 90, "for each rank", size=12, anchor="middle")

    rank_frame(canvas, 930, 110, 186, 176, "rank 0: source rank", SOURCE)
    canvas.text(944, 158, "adds in rank order,", size=13)
    canvas.text(944, 176, "rounds once", size=13)
    canvas.label(944, 216, 158, 34, "out[7]", SOURCE)
    canvas.path("M838 139 C880 139 890 170 926 184", color=FIRST, width=2.5)
    canvas.path("M838 295 C880 295 890 240 926 226", color=SECOND, width=2.5)
    canvas.text(888, 112, "one reduced", size=12, anchor="middle")
    canvas.text(888, 128, "row a rank", size=12, anchor="middle")

    canvas.path("M103 288 L103 368 L346 368", color=INK, dash="4 4")
    canvas.text(
        356,
        372,
        "round headers go first: every rank sends its counts, so that source ranks know the final row of each token",
        size=13,
    )
    return canvas.svg()


def drawn() -> dict[Path, str]:
    """The picture by its file."""
    return {HERE / "route.svg": draw()}


if __name__ == "__main__":
    for file, picture in drawn().items():
        file.write_text(picture)
