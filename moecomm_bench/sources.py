"""Digests of the sources behind each measurement: kernels, and what the host runs.

A result stores the digests of its day, so that a page of results can mark figures of older kernels.
"""

from __future__ import annotations

import ast
import hashlib
import io
import posixpath
import re
import subprocess
import tokenize
from collections.abc import Iterable
from pathlib import Path

from moecomm.gpu import loader

# Files in csrc that a part is compiled from, and Python from beside it; of a folder, all files in it. A digest also
# covers the files that these include, and name.cpp of each name.h.
PARTS: dict[str, tuple[str, ...]] = {
    "dispatch": ("dispatch/dispatch.cuh",),
    "combine": ("combine/combine.cuh",),
    "dispatch between domains": ("dispatch/dispatch.cuh",),
    "combine between domains": ("combine/combine.cuh",),
    "GEMM": ("gemm/gemm.cuh",),
    "fused layer": ("fused/publish.cuh", "fused/expert_layer.cuh", "fused/reduce.cuh"),
    "passes": ("elementwise/used_rows.cuh", "elementwise/routing.cuh", "elementwise/gradients.cuh"),
    "overlap": tuple(
        f"overlap/{kernel}.cuh"
        for kernel in ("all_gather_matmul", "matmul_send", "gemv_all_reduce", "all_reduce", "embedding_all_to_all")
    ),
    "all-gather study": ("bench/gather_matmul.cu",),
    "all-to-all": ("bench/all_to_all.cuh",),
    "put + signal": ("bench/ping_pong.cuh", "bench/ping_pong_through.cuh"),
    "puts": ("transport/puts.cuh",),
    "NIC": ("transport/nic.cuh",),
    "gin": ("transport/gin.cuh", "shims/gin.cu"),
    "nvshmem": ("transport/nvshmem.cuh", "shims/nvshmem.cu"),
    "RMA plugin": ("../rma_plugin/src/plugin.cpp",),
    "host": ("host/dispatch.cpp", "host/combine.cpp"),
    "calls": ("bindings/known_calls.cpp", "bindings/runner.cpp"),
    "balance": ("runtime/balance.cpp",),
    "transfer": ("window/weights.cuh", "../moecomm/transfer"),
    "transfer by CPUs": ("bindings/weights.cpp", "host/weight_casts.cpp", "../moecomm/transfer"),
    "membership": ("../moecomm/buffer/elastic.py", "../moecomm/membership"),
    "deep_ep": ("../moecomm/compat/deep_ep",),
}
YOUNGER = (
    "puts",
    "NIC",
    "calls",
    "balance",
    "membership",
    "deep_ep",
)  # parts that older results lack: bench/launches.json has them by commit
# Parts of one domain leave out files named `scaleout_*` (once `scaleout/*`). Kernels of one domain use nothing there
# but constants of ScaleoutSums, which say that rows of a token begin at lane 0.
_ONE_DOMAIN = ("dispatch", "combine")
_SCALEOUT = re.compile(r"/scaleout[/_]")
_INCLUDED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def digests(csrc: Path | None = None) -> dict[str, str]:
    """Return a digest for each part whose files exist in csrc; comments and white space do not count.

    `csrc` is by default that of this package. A wheel has no sources of the host executor.
    """
    root = csrc or loader.headers()
    return {
        part: _digest(_files(named, root), root, part in _ONE_DOMAIN)
        for part, named in PARTS.items()
        if all((root / f).exists() for f in named)
    }


def python(text: str) -> str:
    """Return the source of a module or function without docstrings, comments and white space."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        first = node.body[0] if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines[first.lineno - 1 : first.end_lineno] = ["\n"] * ((first.end_lineno or 0) - first.lineno + 1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "".join("".join(lines).split())


def commit() -> str:
    """Return the commit of the repository, with "-dirty" where packages or csrc differ from it.

    Empty without a repository or git.
    """
    root = Path(__file__).parents[1]
    git = ["git", "-C", str(root)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
        places = [str(root / name) for name in ("moecomm", "moecomm_bench", "csrc") if (root / name).is_dir()]
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *places], capture_output=True, check=False)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip() + "-dirty" * (changed.returncode == 1)


def _files(named: Iterable[str], root: Path) -> list[str]:
    """Return the files that are named, and those of the folders."""
    found = []
    for name in named:
        folder = root / name
        found += [f"{name}/{path.name}" for path in sorted(folder.glob("*.py"))] if folder.is_dir() else [name]
    return found


def _digest(files: Iterable[str], root: Path, one_domain: bool) -> str:
    """Return the digest of files and of what they include; `one_domain`: without those of scale-out."""
    found: dict[str, str] = {}
    waiting = list(files)
    while waiting:
        name = waiting.pop()
        if name in found or (one_domain and _SCALEOUT.search(name)):
            continue
        text = (root / name).read_text()
        found[name] = python(text) if name.endswith(".py") else "".join(_COMMENT.sub("", text).split())
        # The search order of compilers: the folder of the including file, then csrc.
        for included in _INCLUDED.findall(text):
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(name), included))
            waiting += [near for near in (beside, included) if (root / near).is_file()][:1]
        if name.endswith(".h") and (root / (implementation := name[:-2] + ".cpp")).is_file():
            waiting.append(implementation)
    whole = "".join(f"{name}\n{found[name]}\n" for name in sorted(found))
    return hashlib.sha256(whole.encode()).hexdigest()[:12]
