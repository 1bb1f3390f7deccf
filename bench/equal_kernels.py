"""Compare the machine code of today's kernels with that of a commit: python bench/equal_kernels.py COMMIT [domains].

A digest (moecomm.bench.sources) changes with the text of a kernel's sources, even if its machine code does not.  This
script compiles dispatch and combine kernels from both source trees: the specs of tests/device/test_compile.py, except
verified rounds, and the kernels that `moecomm bench dispatch-combine` launches for DeepSeek-V3: those of one domain on
2, 4 and 8 ranks, or with `domains` those of two domains on 2 and 4, as lsa and an emulated NIC have them.  Kernels of
other models are covered by the test's specs alone.  If all instructions of a part are equal, equal_kernels.json lists
the commit's digest under today's.  Instructions are compared, because the bytes of a cubin contain a constant's name.
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

from moecomm.bench import sources

ROOT = Path(__file__).parent.parent
NOTED = Path(__file__).with_suffix(".json")  # {digest of today: [digests of earlier sources]}
PARTS = ("dispatch", "combine")
OF_DOMAINS = tuple(f"{part} between domains" for part in PARTS)
_PROGRAM = """
import hashlib, json, sys
from tests.compiled import compile_kernel
from tests.device.test_compile import SPECS
from tests.gpu.compile_rounds import TOKENS, kernels
domains = sys.argv[1:] == ["domains"]
found = {name: spec for name, spec in SPECS.items() if bool(spec.domain_ranks) == domains and not spec.verifies}
for ranks in (2, 4) if domains else (2, 4, 8):
    for way in ("puts", "nic") if domains else ("lsa",):
        for tokens in TOKENS[domains:]:  # one token between domains is no case of its own
            specs = enumerate(kernels(ranks, way, tokens))
            found |= {f"{ranks} ranks, {way}, {tokens} tokens, {n}": spec for n, spec in specs}
texts = {spec: "".join(compile_kernel(spec).functions) for spec in {*found.values()}}
codes = {spec: hashlib.sha256(text.encode()).hexdigest() for spec, text in texts.items()}
between = " between domains" * domains
json.dump({f"{spec.op}{between}, {name}": codes[spec] for name, spec in found.items()}, sys.stdout)
"""


def codes(tree: Path, of: Sequence[str]) -> dict[str, str]:
    """Return digests of the instructions of a working tree's kernels, by part and name.  Needs nvdisasm.

    `of`: nothing, or "domains".
    """
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", _PROGRAM, *of]
    found = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(found.stdout))


def compare(commit: str, of: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the kernels that differ, by part.  `of`: see codes()."""
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
    differ = differing(before, now, OF_DOMAINS if of else PARTS)
    note({part: digests[part] for part, names in differ.items() if not names})
    return differ


def differing(before: dict[str, str], now: dict[str, str], parts: Sequence[str] = PARTS) -> dict[str, list[str]]:
    """Return the names of codes() that differ, by part."""
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return {part: [name for name in names if name.startswith(f"{part}, ")] for part in parts}


def note(before: dict[str, str]) -> None:
    """Note digests of a commit, by part, as those of the same machine code as today's."""
    noted, todays = _noted(), sources.digests(ROOT / "csrc")
    for part, digest in before.items():
        now = todays[part]
        # Equality is transitive: what was equal to the commit's is equal to today's.
        equal = {digest, *noted.get(digest, ()), *noted.get(now, ())} - {now}
        if equal:
            noted[now] = sorted(equal)
    noted = {now: digests for now, digests in noted.items() if now in todays.values()}
    NOTED.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")


def equal(now: str) -> tuple[str, ...]:
    """Return the digests of earlier sources of the same machine code as those with this digest."""
    return tuple(_noted().get(now, ()))


def _noted() -> dict[str, list[str]]:
    return dict(json.loads(NOTED.read_text())) if NOTED.exists() else {}


if __name__ == "__main__":
    for part, names in compare(sys.argv[1], sys.argv[2:]).items():
        print(f"{part}: {'the same machine code' if not names else f'{len(names)} kernels differ: {names}'}")
