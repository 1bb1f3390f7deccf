"""Digests of what the host decides and runs for what is measured: python bench/launches.py.

A time depends on more than the source of a kernel:

- Python chooses a kernel's configuration, its warps and shared memory, its blocks and chunks, and the schedules of
  GEMMs.  This module evaluates these choices for usual sizes.
- Tuning tables have most of these choices.  Those of the shipped table are evaluated for all models and sizes that are
  measured, with the code of today.
- Eager times, host times and times of plans depend on the Python that a call runs.  This module repeats calls, and
  takes the source of each function of moecomm that they enter.

A digest changes with a choice or with code, and not with a comment or a docstring.

launches.json has the digests at the commit of each result.  The script adds those of commits that it lacks: it runs
this file with the Python of a work tree of that commit and today's native module.  Where that fails, nothing is noted,
and results of the commit are marked.  It also notes the digests of sources that results of the commit lack, because
the part is younger.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # of `tests`
NOTED = Path(__file__).with_suffix(".json")  # {commit: {"launches", "kernels" and "tables": {part: digest}}}
FEW = " of few tokens"
CASTING = "combine that casts"  # see equal_kernels.CASTS
_MULTIPROCESSORS = 132
_GPU = ""  # of no table: that of moecomm.gpu.tuning.DEFAULT_GPU
_TOKENS = {FEW: (1, 128), "": (4096,)}
_TABLE_TOKENS = {FEW: (1, 8, 16, 32, 64, 128), "": (1024, 2048, 4096, 8192)}
# The shipped table, which holds for GPUs without one of their own: here, and where earlier commits have it.
_TABLES = (Path("moecomm", "gpu", "tuning", "h200.json"), Path("moecomm", "tuning", "h200.json"))
_ALL_TOKENS = {FEW: tuple(2**n for n in range(8)), "": tuple(2**n for n in range(8, 14))}
# What kernels of two domains put through, and their part.  Ranks that NVSHMEM was measured with share memory.
_WAYS = (("nic", "rounds by NIC"), ("gin_proxy", "rounds by gin"), ("puts", "rounds by nvshmem"))
_RING_TOKENS = (768, 2496)
_LAYER_MODELS = ("deepseek-v3", "qwen3-235b")
_PRODUCTS = ((1, 1024, 1024), (128, 8192, 3584), (4096, 8192, 8192))  # rows, columns, depth


@lru_cache(maxsize=1)
def digests() -> dict[str, str]:
    """Return a digest of today's choices for each part, of the moecomm that is imported."""
    return {part: digest for kind in KINDS for part, digest in _digests(kind).items()}


def today() -> dict[str, dict[str, str]]:
    """Return what launches.json would have of a commit with today's code."""
    return {"launches": digests(), "tables": decided()}


def _digests(kind: str) -> dict[str, str]:
    return _hashed(KINDS[kind]())


def _hashed(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    for part, text in found:
        texts.setdefault(part, []).append(text)
    return {part: hashlib.sha256("\n".join(found).encode()).hexdigest()[:12] for part, found in texts.items()}


def _tuning() -> Any:
    """Return moecomm.gpu.tuning, which earlier commits have as moecomm.tuning."""
    try:
        return importlib.import_module("moecomm.gpu.tuning")
    except ImportError:
        return importlib.import_module("moecomm.tuning")


def _source(spec: Any) -> str:
    """Return the source of a kernel, without fields that are younger than digests of results and off in them."""
    from moecomm.gpu import jit

    return jit.source(spec).replace(", .bias_first = false", "")


def _rounds() -> Iterator[tuple[str, str]]:
    """Yield parts, and kernels or blocks of rounds in one domain."""
    from moecomm.backends.lsa_kernels import cluster
    from tests.gpu.compile_rounds import kernels

    tuning = _tuning()
    for ranks, (few, sizes) in itertools.product((2, 4, 8), _TOKENS.items()):
        for tokens in sizes:
            for spec in kernels(ranks, "lsa", tokens):
                yield spec.op + few, _source(spec)
        for op, layout, tokens in itertools.product(tuning.OPS, tuning.LAYOUTS, _TABLE_TOKENS[few]):
            choice = tuning.choose(_GPU, ranks, op, layout, tokens)
            yield op + few, f"{tokens} {choice.blocks} {choice.chunk_tokens} {cluster(choice.blocks, _MULTIPROCESSORS)}"


def _casts() -> Iterator[tuple[str, str]]:
    """Yield the part of combines whose sums are cast, and their kernels and blocks."""
    import torch

    from moecomm.backends.lsa_kernels import combine_spec
    from moecomm.router import MODELS
    from moecomm.testing.prepare import prepare_combine, prepare_dispatch
    from tests.gpu.compile_models import opened

    tuning = _tuning()
    for ranks, tokens in itertools.product((2, 4), (128, 8192)):
        with opened(MODELS["deepseek-v3"], ranks, tokens) as buffer:
            x = torch.zeros(tokens, buffer.hidden, dtype=torch.bfloat16)
            ids, weights = torch.full((tokens, buffer.topk), -1), torch.zeros(tokens, buffer.topk)
            for layout in ("flat", "expert"):
                routed = prepare_dispatch(buffer, x, ids, weights, layout=layout, max_rows=64)
                y = x.new_empty(routed.handle.y_shape)
                for wire in ("fp8", "int8"):
                    yield CASTING, _source(combine_spec(prepare_combine(buffer, y, routed.handle, wire=wire).args))
                choice = tuning.choose(_GPU, ranks, "combine", layout, tokens, casts=True)
                yield CASTING, f"{choice.blocks} {choice.chunk_tokens}"


def _between_domains() -> Iterator[tuple[str, str]]:
    """Yield parts, and kernels or blocks of rounds between two domains, by what they put through and by ranks."""
    from moecomm.backends.lsa_kernels import scaleout_blocks
    from tests.gpu.compile_rounds import kernels

    tuning = _tuning()
    for ranks, (way, part), tokens in itertools.product((2, 4, 8), (("puts", ""), *_WAYS), (128, 4096)):
        for spec in kernels(ranks, way, tokens):
            yield f"{part or f'{spec.op} between domains'}, {ranks} ranks", _source(spec)
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


def _calls() -> Iterator[tuple[str, str]]:
    """Yield the part of eager calls, and the Python of a repeated dispatch and combine, which GPUs share."""
    from tests.test_walks import opened, tensors

    x, ids, weights = tensors()
    for layout in ("flat", "expert", "batched"):
        with opened() as buffer:
            dispatch = partial(buffer.dispatch, x, ids, weights, layout=layout)
            routed = dispatch()
            yield "calls", _functions(dispatch)
            for y in (routed.x, buffer.empty(routed.handle)):
                yield "calls", _functions(partial(buffer.combine, y, routed.handle))


def _layer_calls() -> Iterator[tuple[str, str]]:
    """Yield the part of eager layers, and the Python of a repeated layer on a GPU that takes launches alone."""
    from tests.fused.test_host_calls import layers_of_a_gpu

    with layers_of_a_gpu() as (_, call):
        for fused in (True, False):
            yield "layer calls", _functions(partial(call, fused))


def _plans() -> Iterator[tuple[str, str]]:
    """Yield the part of plans of placement, and the Python that a plan enters."""
    import torch

    from moecomm.balance import plan

    loads = torch.arange(1, 33, dtype=torch.int64).view(2, 16)
    sizes: dict[str, Any] = {"ranks": 4, "slots": 24, "nodes": 2}
    for way in ({"policy": "eplb"}, {"policy": "spread"}, {"policy": "spread", "choice": "nearest"}):
        yield "balance", _functions(partial(plan, loads, **sizes, **way))
    present = plan(loads, **sizes, policy="spread")
    yield "balance", _functions(partial(plan, loads.flip(1), previous=present, policy="spread", max_moves=4))


def _functions(call: Callable[[], object]) -> str:
    """Return the source of each function of moecomm that a repeated call enters."""
    import moecomm

    package, codes = str(Path(moecomm.__file__).parent), set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            codes.add(frame.f_code)

    call()
    call()
    gc.collect()
    gc.disable()  # finalizers of what was there before
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return "\n".join(sorted({_code(code) for code in codes}))


def _code(code: CodeType) -> str:
    """Return the source of the function or method that code is of, or is inside of."""
    text = Path(code.co_filename).read_text()
    nodes = list(ast.parse(text).body)
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            nodes += node.body
        elif isinstance(node, ast.FunctionDef):
            first = min(line.lineno for line in (*node.decorator_list, node))
            if first <= code.co_firstlineno <= (node.end_lineno or 0):
                lines = text.splitlines(keepends=True)[first - 1 : node.end_lineno]
                return _todays_sources().python(textwrap.dedent("".join(lines)))
    return code.co_name  # a lambda of the module, or a class of a NamedTuple


@lru_cache(maxsize=1)
def _todays_sources() -> ModuleType:
    """Return moecomm_bench.sources of this file's tree, whichever moecomm is imported."""
    spec = importlib.util.spec_from_file_location("todays_sources", ROOT / "moecomm_bench" / "sources.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KINDS = {
    "rounds": _rounds,
    "casts": _casts,
    "domains": _between_domains,
    "layers": _layers,
    "products": _products,
    "calls": _calls,
    "layer calls": _layer_calls,
    "plans": _plans,
}


def of_table(text: str) -> dict[str, str]:
    """Return digests of what a tuning table decides, by part; "forms" is whether layers run fused by default."""

    tuning = _tuning()
    with tuning.use(tuning.parse(text)):
        return _hashed(_decided())


@lru_cache(maxsize=1)
def decided() -> dict[str, str]:
    """Return the digests of what today's table decides."""
    return of_table((ROOT / _TABLES[0]).read_text())


def _decided() -> Iterator[tuple[str, str]]:
    import torch

    from moecomm.fused import schedules
    from moecomm.router import MODELS

    tuning = _tuning()
    bf16, fp8 = ((torch.bfloat16, schedules.SCHEDULES), (torch.float8_e4m3fn, schedules.FP8_SCHEDULES))
    for few, sizes in _ALL_TOKENS.items():
        for op, layout, ranks, tokens in itertools.product(tuning.OPS, tuning.LAYOUTS, (2, 4, 8), sizes):
            choice = tuning.choose(_GPU, ranks, op, layout, tokens)
            for part in (op + few, f"{op} between domains"):
                yield part, f"{choice.blocks} {choice.chunk_tokens}"
    for model, ranks, tokens in itertools.product(MODELS.values(), (2, 4, 8), (*_ALL_TOKENS[FEW], *_ALL_TOKENS[""])):
        local, rows = model.num_experts // ranks, max(1, tokens * model.topk * ranks // model.num_experts)
        for dtype, named in (bf16, fp8):
            names = {schedule: name for name, schedule in named.items()}
            for columns, depth in ((2 * model.intermediate, model.hidden), (model.hidden, model.intermediate)):
                yield "GEMM", names[schedules.schedule_of(dtype, rows, local, columns, depth, _MULTIPROCESSORS)]
            yield "fused layer", names[schedules.schedule_of_both(dtype, rows, model.intermediate)]
    for weights, ranks in itertools.product(("bf16", "fp8"), (2, 4, 8)):
        bounds = tuning.fused_from(_GPU, weights, ranks)
        yield "forms", f"{bounds}"


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
            return {"launches": {}, "kernels": {}, "tables": {}}
        try:
            for built in (ROOT / "moecomm").glob("_native*.so"):
                shutil.copy(built, tree / "moecomm")
            launched = {part: digest for kind in KINDS for part, digest in _in(tree, kind).items()}
            kernels = sources.digests(tree / "csrc")
            table = next((tree / path for path in _TABLES if (tree / path).exists()), None)
            decided = {} if table is None else of_table(table.read_text())
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    younger = {part: kernels[part] for part in sources.YOUNGER if part in kernels}
    return {"launches": launched, "kernels": younger, "tables": decided}


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
