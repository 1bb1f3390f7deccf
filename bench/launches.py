"""Digests of the choices by which the host launches what is measured: python bench/launches.py.

A time depends on more than the source of a kernel.  Python and the tuning tables choose a kernel's configuration, its
warps and shared memory, its blocks and chunks, and the schedules of GEMMs.  This module evaluates these choices for
usual sizes.  A digest of them changes with a choice, and not with a comment or a name.

launches.json has the digests at the commit of each result.  The script adds those of commits that it lacks: it runs
this file with the Python of a work tree of that commit and today's native module.  Where that fails, nothing is noted,
and results of the commit are marked.  It also notes the digests of kernels' sources that results of the commit lack,
because the part is younger.

Not covered: the Python that a call runs.  Eager times and host times depend on it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # of `tests`
NOTED = Path(__file__).with_suffix(".json")  # {commit: {"launches": {part: digest}, "kernels": {part: digest}}}
FEW = " of few tokens"
_MULTIPROCESSORS = 132
_GPU = ""  # of no table: that of moecomm.tuning.DEFAULT_GPU
_TOKENS = {FEW: (1, 128), "": (4096,)}
_TABLE_TOKENS = {FEW: (1, 8, 16, 32, 64, 128), "": (1024, 2048, 4096, 8192)}
_WAYS = {"nic": "rounds by NIC", "gin_proxy": "rounds by gin", "nvshmem": "rounds by nvshmem"}
_RING_TOKENS = (768, 2496)
_LAYER_MODELS = ("deepseek-v3", "qwen3-235b")
_PRODUCTS = ((1, 1024, 1024), (128, 8192, 3584), (4096, 8192, 8192))  # rows, columns, depth


@lru_cache(maxsize=1)
def digests() -> dict[str, str]:
    """Return a digest of today's choices for each part, of the moecomm that is imported."""
    return {part: digest for kind in KINDS for part, digest in _digests(kind).items()}


def _digests(kind: str) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    for part, text in KINDS[kind]():
        texts.setdefault(part, []).append(text)
    return {part: hashlib.sha256("\n".join(found).encode()).hexdigest()[:12] for part, found in texts.items()}


def _source(spec: Any) -> str:
    """Return the source of a kernel, without fields that are younger than digests of results and off in them."""
    from moecomm.gpu import jit

    return jit.source(spec).replace(", .bias_first = false", "")


def _rounds() -> Iterator[tuple[str, str]]:
    """Yield parts, and kernels or blocks of rounds in one domain."""
    from moecomm import tuning
    from moecomm.backends.lsa_kernels import cluster
    from tests.gpu.compile_rounds import kernels

    for ranks, (few, sizes) in itertools.product((2, 4, 8), _TOKENS.items()):
        for tokens in sizes:
            for spec in kernels(ranks, "lsa", tokens):
                yield spec.op + few, _source(spec)
        for op, layout, tokens in itertools.product(tuning.OPS, tuning.LAYOUTS, _TABLE_TOKENS[few]):
            choice = tuning.choose(_GPU, ranks, op, layout, tokens)
            yield op + few, f"{tokens} {choice.blocks} {choice.chunk_tokens} {cluster(choice.blocks, _MULTIPROCESSORS)}"


def _between_domains() -> Iterator[tuple[str, str]]:
    """Yield parts, and kernels or blocks of rounds between two domains, by what they put through and by ranks."""
    from moecomm import tuning
    from moecomm.backends.lsa_kernels import scaleout_blocks
    from tests.gpu.compile_rounds import kernels

    for ranks, way, tokens in itertools.product((2, 4, 8), ("puts", *_WAYS), (128, 4096)):
        for spec in kernels(ranks, way, tokens):
            yield f"{_WAYS.get(way, f'{spec.op} between domains')}, {ranks} ranks", _source(spec)
    for ranks, op, layout, tokens in itertools.product((2, 4, 8), tuning.OPS, tuning.LAYOUTS, (128, 4096)):
        choice = tuning.choose(_GPU, ranks, op, layout, tokens)
        blocks = [scaleout_blocks(op, choice.blocks, tokens, ring) for ring in _RING_TOKENS]
        yield f"{op} between domains, {ranks} ranks", f"{tokens} {blocks} {choice.chunk_tokens}"


def _layers() -> Iterator[tuple[str, str]]:
    """Yield parts, and the kernels of expert layers."""
    from moecomm.router import MODELS
    from tests.gpu.compile_models import of_layers

    for model, ranks, tokens in itertools.product(_LAYER_MODELS, (2, 4, 8), (128, 1024, 4096, 8192)):
        for kernel in of_layers(MODELS[model], ranks, tokens):
            part = "GEMM" if kernel.header.startswith("gemm/") else "fused layer"
            yield part, f"{kernel.source} {kernel.shared_bytes}"


def _products() -> Iterator[tuple[str, str]]:
    """Yield the part of overlapped operators, and the schedules of their products."""
    import torch

    from moecomm.overlap.gpu import choose, choose_split

    for ranks, (rows, columns, depth) in itertools.product((2, 4, 8), _PRODUCTS):
        for dtype in (torch.float16, torch.float8_e4m3fn):
            yield "overlap", repr(choose(dtype, None, rows, ranks, columns, depth, _MULTIPROCESSORS))
        yield "overlap", repr(choose_split(rows, columns, _MULTIPROCESSORS))


KINDS = {"rounds": _rounds, "domains": _between_domains, "layers": _layers, "products": _products}


def keys(part: str, ranks: int | None) -> list[str]:
    """Return the digests that belong to a part, in a result of so many ranks; of all numbers where it has none."""
    found = [key for key in digests() if key == part or key.startswith(f"{part}, ")]
    of_ranks = [key for key in found if key in (part, f"{part}, {ranks} ranks")]
    return of_ranks or found


def noted(commit: str) -> dict[str, dict[str, str]]:
    """Return what launches.json has of a commit: {} if it is unknown."""
    return dict(_noted().get(commit, {}))


def unknown(results: list[dict[str, Any]]) -> list[str]:
    """Return the commits of results that launches.json lacks."""
    there = _noted()
    return sorted({found["commit"] for found in results if found["commit"]} - set(there))


@lru_cache(maxsize=1)
def _noted() -> dict[str, dict[str, dict[str, str]]]:
    return dict(json.loads(NOTED.read_text())) if NOTED.exists() else {}


def of_commit(commit: str) -> dict[str, dict[str, str]]:
    """Return the digests at a commit: empty ones if the repository lacks it or its Python does not run today."""
    from moecomm_bench import sources

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        command = ["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(tree), commit]
        if subprocess.run(command, check=False).returncode:
            return {"launches": {}, "kernels": {}}
        try:
            for built in (ROOT / "moecomm").glob("_native*.so"):
                shutil.copy(built, tree / "moecomm")
            launched = {part: digest for kind in KINDS for part, digest in _in(tree, kind).items()}
            kernels = sources.digests(tree / "csrc")
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    return {"launches": launched, "kernels": {part: kernels[part] for part in sources.YOUNGER if part in kernels}}


def _in(tree: Path, kind: str) -> dict[str, str]:
    """Return the digests of one of KINDS by the Python of a work tree; {} if that does not run."""
    words = [sys.executable, str(Path(__file__)), "--print", kind]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    ran = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return dict(json.loads(ran.stdout)) if ran.returncode == 0 else {}


def main() -> None:
    """Add the commits that launches.json lacks, and drop those that no result has."""
    results = [json.loads(path.read_text()) for path in (ROOT / "bench" / "results").glob("*.json")]
    there = {commit: of for commit, of in _noted().items() if any(found["commit"] == commit for found in results)}
    for commit in unknown(results):
        there[commit] = of_commit(commit)
        print(commit, f"{len(there[commit]['launches'])} parts", flush=True)
    NOTED.write_text(json.dumps(there, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--print"]:
        json.dump(_digests(sys.argv[2]), sys.stdout)
    else:
        main()
