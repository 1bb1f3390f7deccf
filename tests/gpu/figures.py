"""tests/gpu/run figures [NAME]... [--out FOLDER] [--minutes N] [--again] [--miniature]: the figures behind the pages.

Pieces go in the order of their value, each under a hard limit. A piece that has a result of this commit is skipped. One
whose limit exceeds the minutes that are left (default: 10) waits for the next call: call again until nothing is left.
A result is FOLDER/NAME-GPU-COUNT.json, for any number of GPUs, with the commit, and in `conditions` clocks, power and
temperature while it was measured. `--again` measures what has a result, too. `--miniature` runs all on two CPU ranks
with tiny sizes.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.processes import ENVIRONMENT, ROOT, all_gpus, wait

GPUS, HALF, FOLDER = "GPUS", "HALF", "FOLDER"  # in a command: how many there are, half of them, where results go
DEEPSEEK = f"--model deepseek-v3 --ranks {GPUS}"
CASES = f"dispatch-combine {DEEPSEEK} --payload bf16,fp8"
BENCH = (sys.executable, "-m", "moecomm.bench")
ZIPF = f"{FOLDER}/zipf.routing"


@dataclass(frozen=True)
class Piece:
    """A command of moecomm bench, the seconds after which it is ended, and one to run before it."""

    name: str
    seconds: int
    words: str
    before: str = ""
    gpus: int = 2  # least number


PIECES = (
    Piece("times-few", 220, f"{CASES} --tokens 1,128 --layout flat,expert,batched --replays 15"),
    Piece("times-many", 180, f"{CASES} --tokens 4096 --layout flat,expert,batched --replays 10"),
    Piece("decode", 100, f"decode {DEEPSEEK} --tokens 1,128 --layout flat,expert,batched --payload fp8"),
    Piece(
        "zipf",
        80,
        f"{CASES} --tokens 4096 --layout flat,expert --replays 10 --routing {ZIPF}",
        before=f"{sys.executable} -m moecomm routing synthesize {ZIPF} --model deepseek-v3 --zipf 0.8 --tokens 131072",
    ),
    # By themselves, because another library may hang.
    Piece(
        "peers",
        300,
        f"{CASES} --tokens 128,4096 --layout flat,expert,batched --replays 20 --no-ceiling "
        "--others deep_ep,nccl_ep,flashinfer,pplx",
    ),
    Piece("symm-mem", 60, f"{CASES} --tokens 128,4096 --layout expert --replays 7 --others torch-symm-mem"),
    Piece("training", 100, f"training --model qwen3-235b --ranks {GPUS} --tokens 4096 --replays 7"),
    Piece("moe-qwen3-235b", 120, f"moe --model qwen3-235b --ranks {GPUS} --tokens 128,1024,8192 --fp8 --replays 7"),
    Piece("moe-deepseek-v3", 150, f"moe --model deepseek-v3 --ranks {GPUS} --tokens 128,1024,8192 --fp8 --replays 7"),
    Piece("eager", 100, f"{CASES} --tokens 128,4096 --layout flat,expert --mode eager --singles 0 --no-peers"),
    Piece("few-sms", 60, f"{CASES} --tokens 4096 --layout flat --sms 16,32,64,0 --replays 10 --no-peers"),
    Piece("latency", 400, "latency --backend lsa,nvshmem,gin --least-bytes 4 --most-bytes 4194304 --replays 9"),
    Piece(
        "domains",
        500,
        f"dispatch-combine {DEEPSEEK} --backend lsa,nvshmem,gin --domain-ranks 0,{HALF} --tokens 128,4096 "
        "--layout flat --payload bf16,fp8 --replays 7 --limit 80",
    ),
    Piece("sweep", 200, f"sweep {DEEPSEEK} --replays 10"),
    Piece("all-to-all", 60, f"all-to-all --ranks {GPUS}"),
    Piece("beside", 100, f"{CASES} --tokens 4096 --layout flat --sms 16 --overlap-gemm --singles 0 --no-peers"),
    Piece("deep-ep-layer", 120, f"deep-ep-layer {DEEPSEEK} --tokens 128,4096"),
    Piece("gemm", 150, "gemm --model deepseek-v3 --ranks 4,8 --dtype bf16,fp8 --replays 3", gpus=1),
)
_SMALL = "--hidden 64 --experts 8 --topk 2 --tokens 3 --ranks 2 --backend host"
_INNER = f"{_SMALL} --intermediate 32"
# Options that make a piece small, by its command: of options that are given twice the later one counts.
MINIATURES = {
    "dispatch-combine": f"{_SMALL} --layout flat --payload bf16 --sms 1 --mode eager --replays 1 --singles 2 "
    "--limit 60 --no-ceiling",
    "decode": f"{_SMALL} --layout flat --payload bf16 --layers 2 --steps 2",
    "training": f"{_INNER} --layers 2 --replays 1",
    "moe": f"{_INNER} --replays 1",
    "latency": "--backend host --least-bytes 4 --most-bytes 8 --replays 1",
    "sweep": f"{_SMALL} --replays 1 --no-ceiling",
    "all-to-all": "--backend host --ranks 2 --part-bytes 8192",
    "deep-ep-layer": f"{_SMALL} --replays 1",
    "gemm": "--hidden 64 --intermediate 32 --topk 2 --experts 8 --tokens 3 --ranks 2 --dtype bf16 --replays 1",
}
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
    left = [piece for piece in chosen if given.again or not is_done(_result(given.out, piece, machine))]
    for piece in set(chosen) - set(left):
        print(f"{piece.name:<16} done before", flush=True)
    if left and not given.miniature:  # all cores at once; ranks that compile wait for each other
        transports = ["lsa", *["puts"] * any(piece.name == "domains" for piece in left)]
        compiling = [sys.executable, "-m", "tests.gpu.compile_rounds", str(gpus), *transports]
        _run(compiling, given.out / "compile.log", min(240.0, ends - time.monotonic()))
    failed = later = 0
    for piece in left:
        if piece.seconds > ends - time.monotonic():
            later += 1
            print(f"{piece.name:<16} later  needs up to {piece.seconds} s", flush=True)
            continue
        failed += not measure(piece, given.out, machine, gpus, small=given.miniature)
    print(f"results: {given.out}{f'; {later} pieces are left: call again' if later else ''}")
    return 1 if failed else 0


def measure(piece: Piece, folder: Path, machine: str, gpus: int, *, small: bool) -> bool:
    """Run a piece, and add the conditions to its result. Returns False if it has failed, or was ended."""
    begin, result, log = time.monotonic(), _result(folder, piece, machine), folder / f"{piece.name}.log"
    fill = {GPUS: str(gpus), HALF: str(max(1, gpus // 2)), FOLDER: str(folder)}
    words = f"{piece.words} {MINIATURES[piece.words.split()[0]]}" if small else piece.words
    commands = [_filled(piece.before, fill).split()] if piece.before else []
    fresh = result.with_suffix(".new")
    commands.append([*BENCH, *_filled(words, fill).split(), "--json", str(fresh)])
    if small and ZIPF in piece.words:  # the file has the experts of its model
        commands[-1] += ["--experts", "256", "--topk", "8"]
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with sampled(folder / f"{piece.name}.clocks") as clocks:
        fine = all(
            _run(command, log, piece.seconds - (time.monotonic() - begin), installed=small) for command in commands
        )
    seconds = time.monotonic() - begin
    if fine:
        found = json.loads(fresh.read_text())
        conditions = {"started": started, "seconds": round(seconds, 1), "gpus": clocks}
        result.write_text(json.dumps({**found, "what": result.stem, "conditions": conditions}, indent=1) + "\n")
        fresh.unlink()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print(f"{piece.name:<16} {'ok' if fine else 'FAILED':<6} {seconds:4.0f} s  {lines[-1][:100] if lines else ''}")
    sys.stdout.flush()
    return fine


def is_done(result: Path) -> bool:
    """Return True if a result is there, complete and of this commit."""
    from moecomm.bench import sources

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
    with log.open("wb") as out:
        try:
            process = subprocess.Popen([*query, "-lms", str(_SAMPLES_MS)], stdout=out, stderr=subprocess.DEVNULL)
        except OSError:
            process = None
        try:
            yield clocks
        finally:
            if process is not None:
                process.terminate()
                process.wait()
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
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            cwd=log.parent if installed else ROOT,
            env=dict(os.environ) if installed else {**os.environ, **ENVIRONMENT},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return wait(process, limit_s) == 0


def _filled(words: str, fill: dict[str, str]) -> str:
    for name, value in fill.items():
        words = words.replace(name, value)
    return words


def _result(folder: Path, piece: Piece, machine: str) -> Path:
    return folder / f"{piece.name}-{machine}.json"


def _kind() -> str:
    """Return the name of the GPU as results have it: h100, h200."""
    import torch

    name = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "cpu"
    found = re.search(r"\b([A-Z]+\d+)", name)
    return found[1].lower() if found else name.lower().replace(" ", "-")
