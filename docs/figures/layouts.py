"""Draws the layouts from what a dispatch over two CPU ranks returns: python docs/figures/layouts.py"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from moecomm.testing import LocalBuffers

HERE = Path(__file__).parent
sys.path.append(str(HERE))

from canvas import INK, RANKS, Canvas  # noqa: E402 - beside this file, which is not a package

EXPERTS, TOPK, MAX_ROWS = 4, 2, 4
# Experts of each token, by source rank.
CHOICES = [[[0, 1], [0, 2], [2, 3]], [[1, 3], [0, 1], [2, 3]]]
ROW, STEP = 26, 32
OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {},
    "expert": {"expert_alignment": 4},
    "batched": {"max_rows": MAX_ROWS},
}
SHAPES = {
    "flat": "layout flat: x is [4, H], one row for each (token, rank)",
    "expert": "layout expert, alignment 4: x is [8, H], one row for each (token, expert)",
    "batched": "layout batched, max_rows 4: x is [2, 4, H], the same room for every expert",
}


def name(rank: int, token: int) -> str:
    """Token 1 of rank 0 is A1, of rank 1 B1."""
    return f"{'AB'[rank]}{token}"


def arrived(layout: str) -> Any:
    """Return what a dispatch of CHOICES hands to rank 0."""
    with LocalBuffers(2, hidden=8, num_experts=EXPERTS, topk=TOPK, max_tokens=3, device="cpu") as ranks:
        calls = [
            {"x": torch.zeros(3, 8, dtype=torch.bfloat16), "topk_idx": torch.tensor(ids), "layout": layout}
            for ids in CHOICES
        ]
        return ranks.dispatch([call | OPTIONS[layout] for call in calls])[0]


def draw_inputs(canvas: Canvas) -> None:
    """Both ranks' tokens and the experts that each picks."""
    for rank, tokens in enumerate(CHOICES):
        top = 64 + rank * 128
        canvas.text(20, top - 10, f"rank {rank}: x and topk_idx", bold=True)
        for token, experts in enumerate(tokens):
            y = top + token * STEP
            canvas.label(20, y, 64, ROW, name(rank, token), RANKS[rank])
            canvas.text(96, y + 18, f"experts {experts[0]}, {experts[1]}")


def draw_rows(
    canvas: Canvas, x: float, top: float, src: list[list[int]], notes: list[str], empty: str = "padding"
) -> None:
    """Rows of x, or `empty` where no token arrived, with a note beside each."""
    for row, ((rank, token), note) in enumerate(zip(src, notes, strict=True)):
        y = top + row * STEP
        if rank < 0:
            canvas.box(x, y, 64, ROW, stroke=INK, dash="4 3")
            canvas.text(x + 32, y + 18, empty, size=12, anchor="middle")
        else:
            canvas.label(x, y, 64, ROW, name(rank, token), RANKS[rank])
        canvas.text(x + 76, y + 18, note)


def draw(layout: str) -> str:
    """The picture of one layout: inputs of both ranks, and rows at rank 0, which owns experts 0 and 1."""
    routed = arrived(layout)
    src, counts = routed.src.tolist(), routed.tokens_per_expert.tolist()
    canvas = Canvas(860, 330, SHAPES[layout])
    draw_inputs(canvas)
    canvas.path("M230 160 L308 160")
    canvas.text(269, 150, "dispatch", anchor="middle")
    canvas.text(330, 24, "rank 0, which owns experts 0 and 1", bold=True)
    canvas.text(330, 44, SHAPES[layout])
    if layout == "flat":
        draw_rows(canvas, 330, 62, src, [f"topk_idx {ids}" for ids in routed.topk_idx.tolist()])
    elif layout == "expert":
        starts = [0, int(routed.rows_per_expert[0])]
        notes = [f"expert {int(row >= starts[1])}" for row in range(len(src))]
        draw_rows(canvas, 330, 62, src, notes)
        canvas.text(520, 178, f"tokens_per_expert {counts}")
        canvas.text(520, 202, f"rows_per_expert {routed.rows_per_expert.tolist()}")
    else:
        for expert, rows in enumerate(src):
            count = counts[expert]
            shown = [pair if row < count else [-1, -1] for row, pair in enumerate(rows)]
            canvas.text(330 + 190 * expert, 74, f"x[{expert}]: expert {expert}")
            draw_rows(canvas, 330 + 190 * expert, 86, shown, ["" for _ in shown], "unused")
        canvas.text(330, 240, f"tokens_per_expert {counts}")
    return canvas.svg()


def drawn() -> dict[Path, str]:
    """Each picture by its file."""
    return {HERE / f"layout_{layout}.svg": draw(layout) for layout in OPTIONS}


if __name__ == "__main__":
    for file, picture in drawn().items():
        file.write_text(picture)
