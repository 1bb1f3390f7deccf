"""python bench/equal_kernels.py COMMIT: are the kernels of a commit the same machine code as those of today?

A digest (moecomm.bench.sources) changes with the text of a kernel's sources, also where the kernel does not.  This
compiles the kernels of rounds with the sources of both: those of tests/device/test_compile.py but for verified rounds,
of which no result has times, and those that `moecomm bench dispatch-combine` launches.  Where all instructions of a
part are equal, equal_kernels.json gets the digest of the commit, as one that is as good as today's.  (Bytes of a cubin
differ by the name of a constant.)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from moecomm.bench import sources

ROOT = Path(__file__).parent.parent
NOTED = Path(__file__).with_suffix(".json")  # {digest of today: [digests of earlier sources]}
PARTS = ("dispatch", "combine")
_PROGRAM = """
import hashlib, json, sys
from tests.compiled import compile_kernel
from tests.device.test_compile import SPECS
from tests.gpu.compile_rounds import TOKENS, kernels
found = {name: spec for name, spec in SPECS.items() if not (spec.domain_ranks or spec.verifies)}
for ranks in (2, 4, 8):
    for tokens in TOKENS:
        found |= {f"{ranks} ranks, {tokens} tokens, {n}": spec for n, spec in enumerate(kernels(ranks, "lsa", tokens))}
texts = {spec: "".join(compile_kernel(spec).functions) for spec in {*found.values()}}
codes = {spec: hashlib.sha256(text.encode()).hexdigest() for spec, text in texts.items()}
json.dump({f"{spec.op}, {name}": codes[spec] for name, spec in found.items()}, sys.stdout)
"""


def codes(tree: Path) -> dict[str, str]:
    """Return digests of the instructions of a working tree's kernels, by part and name.  Needs nvdisasm."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", _PROGRAM]
    found = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(found.stdout))


def compare(commit: str) -> dict[str, list[str]]:
    """Return the kernels that differ, by part."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            for built in (ROOT / "moecomm").glob("_native*.so"):
                shutil.copy(built, tree / "moecomm")
            before, now = codes(tree), codes(ROOT)
            digests = sources.digests(tree / "csrc")
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    differ = {
        part: [name for name in sorted({*before, *now}) if name.startswith(part) and before.get(name) != now.get(name)]
        for part in PARTS
    }
    note({part: digests[part] for part in PARTS if not differ[part]})
    return differ


def note(before: dict[str, str]) -> None:
    """Note digests of a commit, by part, as those of the same machine code as today's."""
    noted = _noted()
    for part, digest in before.items():
        now = sources.digests(ROOT / "csrc")[part]
        # Equality is transitive: what was equal to the commit's is equal to today's.
        equal = {digest, *noted.pop(digest, ()), *noted.get(now, ())} - {now}
        if equal:
            noted[now] = sorted(equal)
    todays = set(sources.digests(ROOT / "csrc").values())
    noted = {now: digests for now, digests in noted.items() if now in todays}
    NOTED.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")


def equal(now: str) -> tuple[str, ...]:
    """Return the digests of earlier sources of the same machine code as those with this digest."""
    return tuple(_noted().get(now, ()))


def _noted() -> dict[str, list[str]]:
    return dict(json.loads(NOTED.read_text())) if NOTED.exists() else {}


if __name__ == "__main__":
    for part, names in compare(sys.argv[1]).items():
        print(f"{part}: {'the same machine code' if not names else f'{len(names)} kernels differ: {names}'}")
