"""tests/gpu/run figures [NAME]... [--out FOLDER] [--minutes N] [--again] [--miniature]: the figures behind the pages.

Pieces go in the order of their value, each under a hard limit; `tests/gpu/run eight` has another order, with tests. A
piece that has a result of this commit is skipped. One whose limit exceeds the minutes that are left (default: 10) waits
for the next call: call again until nothing is left. A piece that has begun before and has no result comes last.

A result is FOLDER/NAME-GPU-COUNT.json, for any number of GPUs, or FOLDER/NAME-GPU.json of a piece that uses one. It has
the commit, and in `conditions` clocks, power and temperature while it was measured. `--again` also measures what has a
result, too. `--miniature` runs on two CPU ranks with tiny sizes, without the pieces that need a GPU. Pieces are in
pieces.py.

`--compile-for GPUS` compiles kernels for so many GPUs into MOECOMM_CACHE_DIR, and ends. It needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from moecomm.config import cache_dir
from moecomm.gpu import linking
from moecomm_bench import sources
from tests.gpu import passed, processes, steps
from tests.gpu.pieces import FOLDER, GPUS, HALF, MINIATURES, PIECES, QUARTER, RECORDED, Piece, has_miniature
from tests.gpu.processes import ENVIRONMENT, ROOT, all_gpus
from tests.gpu.steps import CASES, NVLINK, Step, most_ranks

BENCH = (sys.executable, "-m", "moecomm_bench")
_SAMPLED = ("clocks.sm", "power.draw", "temperature.gpu", "utilization.gpu", "clocks.max.sm", "power.limit")
_SAMPLES_MS = 250


def main(arguments: Sequence[str], order: Callable[[int], Sequence[Piece | Step]] = lambda gpus: PIECES) -> int:
    """Return 1 if a piece, or a step of an order that has steps, has failed.  `order`: of what, on so many GPUs."""
    parser = argparse.ArgumentParser("tests/gpu/run figures", usage=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=ROOT / "figures")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--miniature", action="store_true")
    parser.add_argument("--compile-for", type=int, metavar="GPUS")
    given = parser.parse_args(arguments)
    given.out = given.out.absolute()
    ends = time.monotonic() + 60 * given.minutes
    gpus = given.compile_for or (2 if given.miniature else sum(gpu is not None for gpu in all_gpus()))
    every = order(gpus)
    if unknown := set(given.names) - {one.name for one in every}:
        parser.error(f"{', '.join(sorted(unknown))}: the names are {', '.join(one.name for one in every)}")
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = [one for one in every if one.gpus <= gpus and one.name in (given.names or [one.name])]
    if given.compile_for:
        return 0 if compiled(chosen, gpus, given.out, math.inf) else 1
    machine = f"{'cpu' if given.miniature else _kind()}-{gpus}"
    if given.miniature:
        chosen = [one for one in chosen if isinstance(one, Piece) and has_miniature(one)]
    left = [one for one in chosen if given.again or not has_ended(one, given.out, machine)]
    for one in set(chosen) - set(left):
        print(f"{one.name:<22} done before", flush=True)
    if left and not given.miniature:
        compiled(chosen, gpus, given.out, min(240.0, ends - time.monotonic()))
    # What was begun before, and has failed or was ended, comes last: it may again, and take the time of others.
    left.sort(key=lambda one: was_begun(one, given.out, machine))
    failed = later = 0
    for one in left:
        needed = one.seconds if isinstance(one, Piece) else one.limit_s
        if needed > ends - time.monotonic():
            later += 1
            print(f"{one.name:<22} later  needs up to {needed:.0f} s", flush=True)
        elif isinstance(one, Piece):
            failed += not measure(one, given.out, machine, gpus, small=given.miniature)
        else:
            failed += not steps.run(one, given.out)
    print(f"results: {given.out}{f'; {later} are left: call again' if later else ''}")
    return 1 if failed else 0


def has_ended(one: Piece | Step, folder: Path, machine: str) -> bool:
    """Return True if a piece has a result of this commit, or a step has passed at it."""
    return is_done(_result(folder, one, machine)) if isinstance(one, Piece) else passed.has_passed(folder, one.name)


def was_begun(one: Piece | Step, folder: Path, machine: str) -> bool:
    """Return True if it has begun before and left no result, of any commit."""
    result = isinstance(one, Piece) and _result(folder, one, machine).exists()
    return (folder / f"{one.name}.log").exists() and not result


def compiled(chosen: Sequence[Piece | Step], gpus: int, folder: Path, limit_s: float) -> bool:
    """Compile what pieces and steps launch, by all cores at once: ranks that compile wait for each other.

    A mark beside the kernels says what has been compiled, so that a later call need not look again.
    """
    ends, fine = time.monotonic() + limit_s, True
    for words in compiling(chosen, gpus):
        named = hashlib.sha256(f"{words} {sources.commit()} {linking.nvrtc_version()}".encode()).hexdigest()
        mark = cache_dir() / f"compiled-{named[:16]}"
        if not mark.exists() and ends > time.monotonic():
            done = _run([sys.executable, "-m", *words], folder / "compile.log", ends - time.monotonic())
            fine = fine and done
            with suppress(OSError):  # kernels that can't be kept are compiled by the ranks
                if done:
                    mark.touch()
    return fine


def compiling(chosen: Sequence[Piece | Step], gpus: int) -> list[list[str]]:
    """Return the modules, with their arguments, that compile what pieces and steps launch on so many GPUs."""
    words = [one.words.split() for one in chosen if isinstance(one, Piece)]
    tests = {word for one in chosen if isinstance(one, Step) for word in one.pytest}
    options, found = {word for one in words for word in one}, []
    if models := _models(one for one in words if one[0] in ("dispatch-combine", "decode", "sweep", "deep-ep-layer")):
        through = ["lsa", *["puts"] * ("--domain-ranks" in options), *["nic"] * ("--nic" in options)]
        found.append(["compile_rounds", str(gpus), *models, "--through", *through])
    if models := _models(one for one in words if one[0] in ("moe", "training") or "--gemms" in one):
        found.append(["compile_models", str(gpus), *models])
    if "overlap" in {one[0] for one in words}:
        found.append(["compile_overlap", str(gpus)])
    if any(test.startswith(NVLINK) for test in tests):
        found.append(["compile", str(CASES), "--ranks", str(most_ranks(gpus)), "--processes"])
        found += [[*found[-1], "--domains"]] * any("domains" in test for test in tests)
    return [[f"tests.gpu.{module}", *more] for module, *more in found]


def _models(commands: Iterable[Sequence[str]]) -> list[str]:
    """Return the models that commands name, each once; first DeepSeek-V3, the one that runs between domains."""
    named = (words[words.index("--model") + 1].split(",") for words in commands if "--model" in words)
    return sorted(dict.fromkeys(model for some in named for model in some), key=lambda model: model != "deepseek-v3")


def measure(piece: Piece, folder: Path, machine: str, gpus: int, *, small: bool) -> bool:
    """Run a piece, and add the conditions to its result. Returns False if it has failed, or was ended."""
    begin, result, log = time.monotonic(), _result(folder, piece, machine), folder / f"{piece.name}.log"
    fill = filled_in(gpus, folder)
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


def filled_in(gpus: int, folder: Path) -> dict[str, str]:
    """Return what stands for the names in the words of a piece."""
    parts = {GPUS: gpus, HALF: max(1, gpus // 2), QUARTER: max(1, gpus // 4)}
    return {name: str(value) for name, value in parts.items()} | {FOLDER: str(folder), RECORDED: str(ROOT / RECORDED)}


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
    if words[0].startswith("tests."):
        return [sys.executable, "-m", *words]
    return [*([sys.executable, "-m", "moecomm"] if words[0] == "tune" else BENCH), *words]


def is_done(result: Path) -> bool:
    """Return True if a result is there, complete and of this commit."""
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
