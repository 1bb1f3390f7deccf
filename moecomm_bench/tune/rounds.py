"""`moecomm tune`: a search for the fastest block counts and chunk sizes, and the table that later rounds use."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moecomm.base.protocol import MAX_BLOCKS
from moecomm.errors import BadInput
from moecomm.gpu import tuning
from moecomm.tools.progress import progress
from moecomm_bench import results
from moecomm_bench.case import RoundsCase
from moecomm_bench.clock import percentiles
from moecomm_bench.ours import BF16_WIRE, IN_WINDOW, Ours, TimedOperation
from moecomm_bench.ranks import device_of, on_ranks
from moecomm_bench.tune import tables


@dataclass(frozen=True)
class Candidates:
    """The search space: every chunk size with every block count, at sizes up to each of `case.tokens`."""

    case: RoundsCase  # `case.sms` holds the block counts
    chunks: list[int]
    tolerance: float = 0.02  # fewer blocks win if they are slower by at most this fraction

    def check(self) -> None:
        """Raise BadInput if a candidate is out of range."""
        self.case.check()
        if not self.chunks or any(chunk not in tuning.CHUNKS for chunk in self.chunks):
            raise BadInput("chunks", self.chunks, f"some of {tuning.CHUNKS}")
        if not 1 <= min(self.case.sms) <= max(self.case.sms) <= MAX_BLOCKS:
            raise BadInput("sms", self.case.sms, f"1 to {MAX_BLOCKS}")

    def chunks_at(self, tokens: int) -> list[int]:
        """Return the chunk sizes to try at `tokens`: the smallest, and those that give a rank at least 8 chunks."""
        smallest = min(self.chunks)
        return [chunk for chunk in self.chunks if chunk == smallest or chunk * 8 <= tokens]


def tune(candidates: Candidates, path: Path | None = None, measurements: Path | None = None) -> Path | None:
    """Measure on all ranks and write the table.

    Entries of an existing table that are not measured again are kept.

    Args:
        candidates: what to try.
        path: file of the table. Default: the file in which rounds of this user look for it.
        measurements: file for every single time, as JSON. Default: not written.

    Returns:
        The path of the table; None in a process that has nothing to report.

    Raises:
        BadInput: a candidate is out of range, or the folder cannot be created.
        RanksFailed: at least one rank failed.
    """
    candidates.check()
    tables.make_folder(path)
    by_rank = on_ranks("moecomm_bench.tune.rounds:run_rank", asdict(candidates), candidates.case.ranks)
    if by_rank is None:
        return None
    gpu = by_rank[0]["gpu"]
    measured = merge([found["rows"] for found in by_rank])
    if measurements is not None:
        results.write(
            measurements, {"benchmark": "tune", "gpu": gpu, "case": asdict(candidates.case), "rows": measured}
        )
    return tables.store(gpu, tuning.Table(entries=tuple(choose(candidates, measured))), path)


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """Measure on one rank: rows {op, layout, tokens, blocks, chunk_tokens, us}, where `us` is a list by replay."""
    candidates = Candidates(RoundsCase(**job.pop("case")), **job)
    case = candidates.case
    device = device_of(group, case.backend)
    openings = [(tokens, chunk) for tokens in case.tokens for chunk in candidates.chunks_at(tokens)]
    rows = []
    with progress(group, len(openings)) as step:
        for tokens, chunk in openings:
            step(f"{tokens} tokens, chunks of {chunk}")
            # Each call gets its block count. Each chunk size gets its own Buffer, because plans keep the table's
            # choice.
            with tuning.use(_with_chunk(chunk)), Ours(case, group, device, tokens) as ours:
                for op in operations(case):
                    row = ours.row(op, host=False)
                    about = {"op": op.what, "layout": op.layout, "tokens": tokens, "blocks": op.sms}
                    rows.append({**about, "chunk_tokens": chunk, "us": row.get("us")})
    return {"gpu": tables.gpu_name(device), "rows": rows}


def operations(case: RoundsCase) -> list[TimedOperation]:
    """Return the operations to time at each size: dispatch, and combine.

    Combine takes flat rows from the window, and rows of other layouts with bfloat16 on the wire. Flat rows outside the
    window are copied first and use the entry of layouts whose rows are added up (combine/plan.py).
    """
    found = []
    for layout in case.layouts:
        for blocks in case.sms:
            found.append(TimedOperation("dispatch", layout, case.payloads[0], "", blocks))
            found.append(TimedOperation("combine", layout, "", IN_WINDOW if layout == "flat" else BF16_WIRE, blocks))
    return found


def _with_chunk(chunk: int) -> tuning.Table:
    return tuning.Table(
        tuple(tuning.Entry(op, layout, 1, 1, 1, chunk) for op in tuning.OPS for layout in tuning.LAYOUTS)
    )


def merge(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the rows of all ranks: `us` is the median of the slowest rank; rows that had no room are dropped."""
    found = []
    for parts in zip(*by_rank, strict=True):
        if all(part["us"] is not None for part in parts):
            found.append({**parts[0], "us": percentiles([part["us"] for part in parts])["p50"]})
    return found


def choose(candidates: Candidates, measured: list[dict[str, Any]]) -> list[tuning.Entry]:
    """Choose the table: for each layout and size the chunk that is best for dispatch plus combine, then the blocks.

    A layout that had no room at a size takes the entries of `expert` there.
    """
    ranks, found = candidates.case.ranks, []
    for layout in candidates.case.layouts:
        for tokens in candidates.case.tokens:
            for source in (layout, "expert"):
                here = [row for row in measured if (row["layout"], row["tokens"]) == (source, tokens)]
                if here:
                    entries = _best(candidates, here, ranks)
                    found += [replace(entry, layout=layout) for entry in entries]
                    break
    return sorted(found, key=lambda e: (e.op, e.layout, e.tokens))


def _best(candidates: Candidates, rows: list[dict[str, Any]], ranks: int) -> list[tuning.Entry]:
    """Choose the entries of one layout and size."""

    def fastest(op: str, chunk: int) -> float:
        return min(float(row["us"]) for row in rows if (row["op"], row["chunk_tokens"]) == (op, chunk))

    chunk = min({row["chunk_tokens"] for row in rows}, key=lambda c: sum(fastest(op, c) for op in tuning.OPS))
    entries = []
    for op in tuning.OPS:
        enough = fastest(op, chunk) * (1 + candidates.tolerance)
        fine = [row for row in rows if (row["op"], row["chunk_tokens"]) == (op, chunk) and row["us"] <= enough]
        row = min(fine, key=lambda row: int(row["blocks"]))
        entries.append(tuning.Entry(op, row["layout"], ranks, row["tokens"], row["blocks"], chunk))
    return entries
