"""Builds gin_program.cu, a GIN program that is not moecomm, and runs it with the plugin on the GPUs of this machine.

    python -m tests.rma_plugin.gin_program build <program>    where nvcc and a wheel of NCCL are
    python -m tests.rma_plugin.gin_program run <program>      where GPUs are; the program may have been built elsewhere

Ranks are threads or processes, and NCCL's domains have all GPUs or one.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moecomm import rma_plugin
from moecomm.shims.build import SHIMS, version, wheels

OLDEST = SHIMS["gin_proxy"][3]
SOURCE = Path(__file__).with_name("gin_program.cu")
# The proxy alone: the other GIN backends want headers and hardware of their own.
DEFINES = ("-DNCCL_GIN_GDAKI_ENABLE=0", "-DNCCL_GIN_GPI_ENABLE=0")


def nccl() -> Path | None:
    """The folder of NCCL's wheel, with its headers and its library; None where the headers are older than GIN's."""
    folders = (folder for folder in wheels("nccl") if (folder / "include" / "nccl.h").is_file())
    return next((folder for folder in folders if version("NCCL", folder / "include") >= OLDEST), None)


def build(program: Path) -> None:
    folder = nccl()
    if folder is None:
        raise SystemExit("no wheel of NCCL with a device API is installed")
    flags = ["-O2", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", *DEFINES, f"-I{folder / 'include'}"]
    libraries = [f"-L{folder / 'lib'}", "-l:libnccl.so.2"]
    subprocess.run(["nvcc", *flags, str(SOURCE), "-o", str(program), *libraries], check=True)


def run(program: Path, ranks: int, how: str, lsa: int | None, timeout_s: float = 120) -> str:
    """Return what it printed; raise if a rank failed."""
    folder = nccl()
    libraries = [] if folder is None else [str(folder / "lib")]
    environment = {
        **os.environ,
        **rma_plugin.environment(timeout_s=30),
        "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    }
    if lsa is not None:
        environment["NCCL_LSA_TEAM_SIZE"] = str(lsa)
    with tempfile.TemporaryDirectory() as scratch, open(Path(scratch) / "log", "w+") as log:
        words = [[str(program), str(ranks)]]
        if how == "processes":
            words = [[str(program), str(ranks), str(rank), str(Path(scratch) / "id")] for rank in range(ranks)]
        started = [subprocess.Popen(line, env=environment, stdout=log, stderr=log) for line in words]
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and all(process.poll() is None for process in started):
            time.sleep(0.05)
        deadline = min(deadline, time.monotonic() + 60)  # the others, once one has ended
        while time.monotonic() < deadline and any(process.poll() is None for process in started):
            time.sleep(0.05)
        codes = [process.poll() for process in started]
        for process in started:
            process.kill()
            process.wait()
        log.seek(0)
        text = log.read()
    if codes != [0] * len(codes):
        raise RuntimeError(f"{how}, NCCL_LSA_TEAM_SIZE {lsa}: {codes} (None: it hung)\n{text}")
    return text


def main(words: list[str]) -> None:
    if len(words) != 2 or words[0] not in ("build", "run"):
        raise SystemExit(__doc__)
    program = Path(words[1]).absolute()
    if words[0] == "build":
        return build(program)
    import torch

    ranks = torch.cuda.device_count()
    for how, lsa in itertools.product(("processes", "threads"), (None, 1)):
        print(f"== {ranks} {how}, NCCL_LSA_TEAM_SIZE {'unset' if lsa is None else lsa}", flush=True)
        print(run(program, ranks, how, lsa), flush=True)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
