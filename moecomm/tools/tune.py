"""moecomm tune: finds how many blocks and which chunks are fastest here, and writes the table that rounds then use."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moecomm import tuning
from moecomm.bench import results
from moecomm.bench.case import Case
from moecomm.bench.clock import percentiles
from moecomm.bench.ours import BF16_WIRE, IN_WINDOW, Operation, Ours
from moecomm.bench.ranks import device_of, on_ranks, progress
from moecomm.config import cache_dir
from moecomm.core.protocol import MAX_BLOCKS
from moecomm.errors import BadInput
from moecomm.jit import trusted_files
from moecomm.jit.trusted_files import Access


@dataclass(frozen=True)
class Candidates:
    """What is tried: every chunk with every number of blocks, at sizes up to each of `case.tokens`."""

    case: Case  # `sms` are the numbers of blocks
    chunks: list[int]
    tolerance: float = 0.02  # fewer blocks are taken where they are slower by no more than this part

    def check(self) -> None:
        """Raises BadInput."""
        self.case.check()
        if not self.chunks or any(chunk not in tuning.CHUNKS for chunk in self.chunks):
            raise BadInput("chunks", self.chunks, f"some of {tuning.CHUNKS}")
        if not 1 <= min(self.case.sms) <= max(self.case.sms) <= MAX_BLOCKS:
            raise BadInput("sms", self.case.sms, f"1 to {MAX_BLOCKS}")

    def chunks_at(self, tokens: int) -> list[int]:
        """Not so large that a rank has but a few chunks, as long as there are smaller ones."""
        smallest = min(self.chunks)
        return [chunk for chunk in self.chunks if chunk == smallest or chunk * 8 <= tokens]


def tune(candidates: Candidates, path: Path | None = None, measurements: Path | None = None) -> Path | None:
    """Measures on all ranks, and writes the table to `path` (default: where this user's is looked for); says where.

    A table that is there already keeps what has not been measured anew.  `measurements`: where every single time is
    written as well.  None in a process that has nothing to report.  Raises BadInput, RanksFailed.
    """
    candidates.check()
    _make_folder(path)
    by_rank = on_ranks("moecomm.tools.tune:run_rank", asdict(candidates), candidates.case.ranks)
    if by_rank is None:
        return None
    gpu = by_rank[0]["gpu"]
    measured = merge([found["rows"] for found in by_rank])
    if measurements is not None:
        results.write(
            measurements, {"benchmark": "tune", "gpu": gpu, "case": asdict(candidates.case), "rows": measured}
        )
    older = tuning.users(gpu) if path is None else _table_in(path)
    content = tuning.content(gpu, _merged(older, choose(candidates, measured)))
    if path is not None:
        return results.write(path, content)
    path = tuning.users_path(gpu)
    trusted_files.write(path, Access.READ_ONLY, results.document(path.stem, content).encode())
    return path


def _make_folder(path: Path | None) -> None:
    """Of the table.  Before anything is measured: what can't be written would be lost."""
    argument, folder = ("MOECOMM_CACHE_DIR", cache_dir()) if path is None else ("out", path.parent)
    try:
        if path is None:
            trusted_files.make_directory(folder, Access.READ_ONLY)
        else:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(argument, str(folder), f"a directory that is there or can be made ({error})") from None


def _table_in(path: Path) -> tuning.Table:
    """The entries of a file that the caller has named; none if it holds no table."""
    try:
        return tuning.parse(path.read_text())
    except (OSError, ValueError):
        return ()


def _merged(older: tuning.Table, table: list[tuning.Entry]) -> list[tuning.Entry]:
    """The entries, and those of an older table that speak of other rounds."""

    def key(entry: tuning.Entry) -> tuple[str, str, int, int]:
        return entry.op, entry.layout, entry.ranks, entry.tokens

    kept = {key(entry): entry for entry in (*older, *table)}
    return [kept[place] for place in sorted(kept)]


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """One rank: rows {op, layout, tokens, blocks, chunk_tokens, us}, `us` by replay."""
    candidates = Candidates(Case(**job.pop("case")), **job)
    case = candidates.case
    device = device_of(group, case.backend)
    openings = [(tokens, chunk) for tokens in case.tokens for chunk in candidates.chunks_at(tokens)]
    rows = []
    with progress(group, len(openings)) as step:
        for tokens, chunk in openings:
            step(f"{tokens} tokens, chunks of {chunk}")
            # Blocks are asked for; a Buffer of its own for each chunk, as rounds remember what the table said.
            with tuning.use(_with_chunk(chunk)), Ours(case, group, device, tokens) as ours:
                for op in operations(case):
                    row = ours.row(op, host=False)
                    about = {"op": op.what, "layout": op.layout, "tokens": tokens, "blocks": op.sms}
                    rows.append({**about, "chunk_tokens": chunk, "us": row.get("us")})
    return {"gpu": gpu_name(device), "rows": rows}


def gpu_name(device: torch.device) -> str:
    """The name that tables are found by."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else "cpu"


def operations(case: Case) -> list[Operation]:
    """What is timed at each size: dispatch, and the combine of rows in the window or, of others, with bfloat16 on the
    wire.  Flat rows outside, which are copied, take what is found for those that are added up (combine/plan.py).
    """
    found = []
    for layout in case.layouts:
        for blocks in case.sms:
            found.append(Operation("dispatch", layout, case.payloads[0], "", blocks))
            found.append(Operation("combine", layout, "", IN_WINDOW if layout == "flat" else BF16_WIRE, blocks))
    return found


def _with_chunk(chunk: int) -> list[tuning.Entry]:
    return [tuning.Entry(op, layout, 1, 1, 1, chunk) for op in tuning.OPS for layout in tuning.LAYOUTS]


def merge(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of all ranks, `us` their median as the slowest saw it; without what had no room."""
    found = []
    for parts in zip(*by_rank, strict=True):
        if all(part["us"] is not None for part in parts):
            found.append({**parts[0], "us": percentiles([part["us"] for part in parts])["p50"]})
    return found


def choose(candidates: Candidates, measured: list[dict[str, Any]]) -> list[tuning.Entry]:
    """The table: for each layout and size the chunk that is best for dispatch and combine together, then blocks.

    A layout that had no room at a size takes what `expert` takes there.
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
    """Of one layout and size."""

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
