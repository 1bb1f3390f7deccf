"""tests/gpu/run figures [NAME]... [--out FOLDER] [--minutes N] [--again] [--miniature]: the figures behind the pages.

Pieces go in the order of their value, each under a hard limit. A piece that has a result of this commit is skipped. One
whose limit exceeds the minutes that are left (default: 10) waits for the next call: call again until nothing is left.
A result is FOLDER/NAME-GPU-COUNT.json, for any number of GPUs, or FOLDER/NAME-GPU.json of a piece that uses one. It has
the commit, and in `conditions` clocks, power and temperature while it was measured. `--again` also measures what has a
result, too. `--miniature` runs on two CPU ranks with tiny sizes, without the pieces that need a GPU. Pieces, and the
results that have none, are in pieces.py.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.gpu import processes
from tests.gpu.pieces import FOLDER, GPUS, HALF, MINIATURES, PIECES, RECORDED, Piece, has_miniature
from tests.gpu.processes import ENVIRONMENT, ROOT, all_gpus

BENCH = (sys.executable, "-m", "moecomm_bench")
_SAMPLED = ("clocks.sm", "power.draw", "temperature.gpu", "utilization.gpu", "clocks.max.sm", "power.limit")
_SAMPLES_MS = 250


def main(arguments: Sequence[str]) -> int:
    """Return 1 if a piece has failed."""
    parser = argparse.ArgumentParser("tests/gpu/run figures", usage=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=ROOT / "figures")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--miniature", action="store_true")
    given = parser.parse_args(arguments)
    given.out = given.out.absolute()
    if unknown := set(given.names) - {piece.name for piece in PIECES}:
        parser.error(f"{', '.join(sorted(unknown))}: the pieces are {', '.join(piece.name for piece in PIECES)}")
    given.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * given.minutes
    gpus = 2 if given.miniature else sum(gpu is not None for gpu in all_gpus())
    machine = f"{'cpu' if given.miniature else _kind()}-{gpus}"
    chosen = [piece for piece in PIECES if piece.gpus <= gpus and piece.name in (given.names or [piece.name])]
    if given.miniature:
        chosen = [piece for piece in chosen if has_miniature(piece)]
    left = [piece for piece in chosen if given.again or not is_done(_result(given.out, piece, machine))]
    for piece in set(chosen) - set(left):
        print(f"{piece.name:<22} done before", flush=True)
    if left and not given.miniature:  # all cores at once; ranks that compile wait for each other
        options = {word for piece in left for word in piece.words.split()}
        transports = ["lsa", *["puts"] * ("--domain-ranks" in options), *["nic"] * ("--nic" in options)]
        compiling = [sys.executable, "-m", "tests.gpu.compile_rounds", str(gpus), *transports]
        _run(compiling, given.out / "compile.log", min(240.0, ends - time.monotonic()))
    failed = later = 0
    for piece in left:
        if piece.seconds > ends - time.monotonic():
            later += 1
            print(f"{piece.name:<22} later  needs up to {piece.seconds} s", flush=True)
            continue
        failed += not measure(piece, given.out, machine, gpus, small=given.miniature)
    print(f"results: {given.out}{f'; {later} pieces are left: call again' if later else ''}")
    return 1 if failed else 0


def measure(piece: Piece, folder: Path, machine: str, gpus: int, *, small: bool) -> bool:
    """Run a piece, and add the conditions to its result. Returns False if it has failed, or was ended."""
    begin, result, log = time.monotonic(), _result(folder, piece, machine), folder / f"{piece.name}.log"
    fill = {GPUS: str(gpus), HALF: str(max(1, gpus // 2)), FOLDER: str(folder), RECORDED: str(ROOT / RECORDED)}
    words = f"{piece.words} {MINIATURES[piece.words.split()[0]]}" if small else piece.words
    commands = [_filled(piece.before, fill).split()] if piece.before else []
    fresh = result.with_suffix(".new")
    commands.append([*program(_filled(words, fill).split()), "--json", str(fresh)])
    if small and "--routing" in piece.words:
        commands[-1] += _experts(piece)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with sampled(folder / f"{piece.name}.clocks") as clocks:
        fine = all(
            _run(command, log, piece.seconds - (time.monotonic() - begin), installed=small) for command in commands
        )
    seconds = time.monotonic() - begin
    if fine:
        found = json.loads(fresh.read_text())
        # As it is kept: the result among those of the pages, other files wherever the command runs.
        command = found["command"].replace(str(fresh), f"bench/results/{result.name}").replace(f"{folder}/", "")
        command = command.replace(str(ROOT / RECORDED), RECORDED)
        if small:
            command = command.replace(f"{os.path.relpath(ROOT, log.parent)}/", "")
        conditions = {"started": started, "seconds": round(seconds, 1), "gpus": clocks}
        kept = {**found, "what": result.stem, "command": command, "conditions": conditions}
        result.write_text(json.dumps(kept, indent=1) + "\n")
        fresh.unlink()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print(f"{piece.name:<22} {'ok' if fine else 'FAILED':<6} {seconds:4.0f} s  {lines[-1][:100] if lines else ''}")
    sys.stdout.flush()
    return fine


def _experts(piece: Piece) -> list[str]:
    """Return the options with the experts of the model, which are those of the file that the piece replays."""
    from moecomm.router import MODELS

    words = piece.words.split()
    model = MODELS[words[words.index("--model") + 1]]
    return ["--experts", str(model.num_experts), "--topk", str(model.topk)]


def program(words: Sequence[str]) -> list[str]:
    """Return the command line of a piece's words."""
    if words[0].endswith(".py"):
        return [sys.executable, str(ROOT / "bench" / words[0]), *words[1:]]
    return [*([sys.executable, "-m", "moecomm"] if words[0] == "tune" else BENCH), *words]


def is_done(result: Path) -> bool:
    """Return True if a result is there, complete and of this commit."""
    from moecomm_bench import sources

    try:
        found = json.loads(result.read_text())
    except (OSError, ValueError):
        return False
    return "conditions" in found and found.get("commit") == sources.commit()


@contextmanager
def sampled(log: Path) -> Iterator[list[dict[str, Any]]]:
    """Sample the clocks of all GPUs meanwhile; afterwards the list has a summary for each. Empty without nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu=index,{','.join(_SAMPLED)}", "--format=csv,noheader,nounits"]
    clocks: list[dict[str, Any]] = []
    with log.open("wb") as out, ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(processes.started([*query, "-lms", str(_SAMPLES_MS)], out))
        yield clocks
    clocks += summary(log.read_text(errors="replace"))


def summary(text: str) -> list[dict[str, Any]]:
    """Return {gpu, sm_mhz, power_w, temperature_c, most_sm_mhz, power_limit_w} of each GPU from lines of nvidia-smi.

    Of clocks and power [least, median, most] of the samples in which the GPU was busy, or of all if it never was.
    """
    samples: dict[int, list[list[float]]] = {}
    for row in csv.reader(text.splitlines()):
        numbers = [re.sub(r"[^0-9.]", "", cell) for cell in row]
        if len(row) == 1 + len(_SAMPLED) and all(numbers):
            gpu, *values = map(float, numbers)
            samples.setdefault(int(gpu), []).append(values)
    found = []
    for gpu, every in sorted(samples.items()):
        busy = [values for values in every if values[3] > 0] or every
        mhz, watts, degrees, _, most, limit = zip(*busy, strict=True)
        spread = {"sm_mhz": _spread(mhz), "power_w": _spread(watts)}
        limits = {"most_sm_mhz": most[0], "power_limit_w": limit[0]}
        found.append({"gpu": gpu, **spread, "temperature_c": max(degrees), **limits, "samples": len(busy)})
    return found


def _spread(values: Sequence[float]) -> list[float]:
    return [min(values), statistics.median(values), max(values)]


def _run(command: Sequence[str], log: Path, limit_s: float, *, installed: bool = False) -> bool:
    """`installed`: run the moecomm that is installed, which need not be that of this tree."""
    where = {"cwd": log.parent, "env": os.environ} if installed else {"env": {**os.environ, **ENVIRONMENT}}
    with log.open("ab") as out:
        return processes.run(command, out, limit_s, **where) == 0


def _filled(words: str, fill: dict[str, str]) -> str:
    for name, value in fill.items():
        words = words.replace(name, value)
    return words


def _result(folder: Path, piece: Piece, machine: str) -> Path:
    where = machine if piece.gpus > 1 else machine.rpartition("-")[0]
    return folder / f"{piece.name}-{where}.json"


def _kind() -> str:
    """Return the name of the GPU as results have it: h100, h200."""
    import torch

    name = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "cpu"
    found = re.search(r"\b([A-Z]+\d+)", name)
    return found[1].lower() if found else name.lower().replace(" ", "-")
