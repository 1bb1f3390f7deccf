"""Compare the machine code of today's kernels with that of a commit: python bench/equal_kernels.py COMMIT [SET].

A digest (moecomm_bench.sources) changes with the text of a kernel's sources, even if its machine code does not.  This
script compiles kernels from both source trees.  If all instructions of a part are equal, equal_kernels.json lists the
commit's digest under today's.  Instructions are compared, because the bytes of a cubin contain a constant's name.
Kernels that send few tokens in packets, and those with a placement, are parts of their own, with the sources of the
part that they are named after.  A part of which the commit's tests compile no kernel is not equal.

| set | kernels |
| --- | --- |
| rounds (default) | dispatch and combine in one domain: the specs of tests/device/test_compile.py, except verified \
rounds, and those that `moecomm bench dispatch-combine` launches for DeepSeek-V3 on 2, 4 and 8 ranks |
| domains | likewise in two domains, on 2 and 4 ranks, as lsa and an emulated NIC have them |
| others | GEMMs, fused layers, passes, overlapped operators, benchmarks: those that the tests compile |

Kernels of other models are covered by the tests' kernels alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moecomm_bench import sources

ROOT = Path(__file__).parent.parent
NOTED = Path(__file__).with_suffix(".json")  # {digest of today, FEW behind it or not: [digests of earlier sources]}
FEW = " of few tokens"
PLACED = " with a placement"
CASTS = " that casts"  # combines in FP8 and INT8, which are not compared: only the same source is the same
SETS = {
    "rounds": ("dispatch", "combine", f"dispatch{FEW}", f"combine{FEW}", f"dispatch{PLACED}"),
    "domains": ("dispatch between domains", "combine between domains", f"dispatch between domains{PLACED}"),
    "others": ("GEMM", "fused layer", "passes", "overlap", "all-to-all", "put + signal"),
}
_ROUNDS = """
import sys
from tests.device.test_compile import SPECS
from tests.gpu.compile_rounds import TOKENS, kernels
domains = sys.argv[1] == "domains"
specs = {name: spec for name, spec in SPECS.items() if bool(spec.domain_ranks) == domains and not spec.verifies}
for ranks in (2, 4) if domains else (2, 4, 8):
    for way in ("puts", "nic") if domains else ("lsa",):
        for tokens in TOKENS[domains:]:  # one token between domains is no case of its own
            numbered = enumerate(kernels(ranks, way, tokens))
            specs |= {f"{ranks} ranks, {way}, {tokens} tokens, {n}": spec for n, spec in numbered}
few, placed, between = " of few tokens", " with a placement", " between domains" * domains
kinds = {name: placed if getattr(spec, "placed", False) else few * spec.packets for name, spec in specs.items()}
found = {f"{spec.op}{between}{kinds[name]}, {name}": spec for name, spec in specs.items()}
"""
_OTHERS = """
from tests.bench import test_kernels
from tests.device import test_overlap_kernels, test_plain_kernels
from tests.fused import test_compute, test_pipeline, test_schedules
PARTS = {
    "gemm/": "GEMM", "fused/": "fused layer", "elementwise/": "passes", "overlap/": "overlap",
    "bench/all_to_all": "all-to-all", "bench/ping_pong": "put + signal",
}
lists = (test_schedules.KERNELS, test_pipeline.KERNELS, test_compute.KERNELS, test_plain_kernels.KERNELS)
found = {}
for kernels in (*lists, test_overlap_kernels.ALL, test_kernels.ALL):
    for name, kernel in kernels.items():
        parts = [part for begin, part in PARTS.items() if kernel.header.startswith(begin)]
        found |= {f"{part}, {kernel.header}, {name}": kernel for part in parts}
"""
_CASTS = "on the wire"  # in the names of combines that cast
_COMPILE = """
import hashlib, json, re, sys
from tests.compiled import compile_kernel
texts = {kernel: "".join(compile_kernel(kernel).functions) for kernel in {*found.values()}}
# The name of a function that is not inlined contains the fields of its configuration, and lines are padded to it.
texts = {kernel: " ".join(re.sub(r"_ZN7moecomm\\w+", "", text).split()) for kernel, text in texts.items()}
codes = {kernel: hashlib.sha256(text.encode()).hexdigest() for kernel, text in texts.items()}
json.dump({name: codes[kernel] for name, kernel in found.items()}, sys.stdout)
"""


def codes(tree: Path, of: str) -> dict[str, str]:
    """Return digests of the instructions of a working tree's kernels, by part and name.  Needs nvdisasm."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    program = (_OTHERS if of == "others" else _ROUNDS) + _COMPILE
    command = [sys.executable, "-c", program, of]
    found = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(found.stdout))


def compare(commit: str, of: str = "rounds") -> dict[str, list[str]]:
    """Return the kernels of a set that differ, by part."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            for built in (ROOT / "moecomm").glob("_native*.so"):
                shutil.copy(built, tree / "moecomm")
            with ThreadPoolExecutor() as pool:
                before, now = pool.map(codes, (tree, ROOT), (of, of))
            digests = sources.digests(tree / "csrc")
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    differ = differing(before, now, SETS[of])
    # Of older trees, parts whose files have other names today have no digest.
    found = {part: digests.get(source_of(part), "") for part, names in differ.items() if not names}
    note({part: digest for part, digest in found.items() if digest})
    return differ


def differing(before: dict[str, str], now: dict[str, str], parts: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of codes() that differ or are no more, by part.  New ones are configurations of today.

    A number that ends a name counts kernels of a benchmark, in which new ones may come before it.  Combines that cast
    do not count: tables of formats alone have them.  Of a part without a kernel before, all of today are named: nothing
    shows that they are equal.
    """
    found = {}
    for part in parts:
        of_part = f"{part}, "
        todays = {code for name, code in now.items() if name.startswith(of_part)}
        if not any(name.startswith(of_part) for name in before):
            found[part] = sorted(name for name in now if name.startswith(of_part))
            continue
        found[part] = [
            name
            for name in sorted(before)
            if name.startswith(of_part) and before[name] != now.get(name)
            if not (name[-1].isdigit() and before[name] in todays)
            if _CASTS not in name
        ]
    return found


def source_of(part: str) -> str:
    """Return the part of moecomm_bench.sources with the sources of a part."""
    return part.removesuffix(FEW).removesuffix(PLACED).removesuffix(CASTS)


def key(part: str, digest: str) -> str:
    """Return the key of a part with this digest in equal_kernels.json."""
    return digest + part[len(source_of(part)) :]


def note(before: dict[str, str]) -> None:
    """Note digests of a commit, by part, as those of the same machine code as today's."""
    noted, todays = _noted(), sources.digests(ROOT / "csrc")
    for part, digest in before.items():
        now = todays[source_of(part)]
        # Equality is transitive: what was equal to the commit's is equal to today's.
        of_commit, of_today = (noted.get(key(part, one), ()) for one in (digest, now))
        equal = {digest, *of_commit, *of_today} - {now}
        if equal:
            noted[key(part, now)] = sorted(equal)
    noted = {now: digests for now, digests in noted.items() if source_of(now) in todays.values()}
    NOTED.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")


def equal(part: str, now: str) -> tuple[str, ...]:
    """Return the digests of earlier sources from which this part has the same machine code as from those of today."""
    return tuple(_noted().get(key(part, now), ()))


def _noted() -> dict[str, list[str]]:
    return dict(json.loads(NOTED.read_text())) if NOTED.exists() else {}


if __name__ == "__main__":
    for part, names in compare(*sys.argv[1:]).items():
        print(f"{part}: {'the same machine code' if not names else f'{len(names)} kernels differ: {names}'}")
