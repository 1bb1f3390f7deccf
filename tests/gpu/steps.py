"""Steps of tests/gpu/run: commands, mostly of pytest, with limits, and the parts that they are in."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.gpu import passed, processes
from tests.gpu.processes import ENVIRONMENT, all_gpus

CASES, SEED = int(os.environ.get("CASES", "300")), os.environ.get("SEED", "0")
SHARE = int(os.environ.get("SHARE", "1"))
LOGS = Path(os.environ.get("LOGS") or f"{tempfile.gettempdir()}/moecomm-{os.getpid()}")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--seed", SEED)
SANITIZER = ("compute-sanitizer", "--report-api-errors", "no", "--tool")
FAILS, ALL = ("--error-exitcode", "9"), "R4"
# Tests compare the rows that are in use, but copy complete outputs; so do kernels of torch.
OURS = ("--kernel-name", "kernel_substring=moecomm", "--check-api-memory-access", "no")
# Options of a tool, and the tests that it runs.  What some of them find all the same: docs/maintainers/testing.md.
TOOLS: dict[str, tuple[tuple[str, ...], str]] = {
    "memcheck": (FAILS, ALL),
    "racecheck": ((), ALL),
    "initcheck": (OURS, ALL),
    "synccheck": (FAILS, f"{ALL} and not domains"),
}
FUSED = "fused"  # in names of tests of test_moe.py, and of their parameters
NVLINK, MOE = "tests/gpu/test_nvlink.py::test", "tests/gpu/test_moe.py"
TORCH = "tests/gpu/test_beside_torch.py::test"
MODELS = {
    "deepseek-v3": "16,128,512,1024,2048,4096,8192",
    "qwen3-235b": "16,128,512,1024,4096,8192",
    "gpt-oss-120b": "16,128,512,1024,4096",
    "mixtral-8x7b": "16,128,512,4096",
    "qwen3-30b-a3b": "128,1024,8192",
}
GPUS = "GPUS"  # in a command: how many there are
RANKS, COUNTS = "RANKS", (2, 4, 8)  # RANKS in the name of a step or test: the largest of COUNTS that the GPUs allow
BACKENDS, ROUNDS = "lsa,nvshmem,gin", f"--ranks {GPUS} --tokens 128,4096 --layout flat --replays 7 --limit 240"


@dataclass(frozen=True)
class Step:
    """A command, and the GPUs that it takes.  `pytest`: its arguments, where the command is that.

    `seconds`: its limit; of `random` ones that of 300 cases, and a second more for ten more of them.  `shares`: a GPU,
    with other steps.
    """

    name: str
    seconds: int
    pytest: tuple[str, ...] = ()
    gpus: int = 4
    command: tuple[str, ...] = ()
    random: bool = False
    before: tuple[str, ...] = ()  # words in front of pytest
    cases: int = CASES
    shares: bool = True

    @property
    def words(self) -> tuple[str, ...]:
        """Return the command that is run."""
        return self.command or (*self.before, *PYTEST, "--gpu-cases", str(self.cases), *self.pytest)

    @property
    def limit_s(self) -> float:
        """When it is ended."""
        return self.seconds + self.random * max(0, CASES - 300) / 10


def one(name: str, seconds: int, *pytest: str, random: bool = True, shares: bool = True) -> Step:
    """A step of one GPU."""
    return Step(name, seconds, (*pytest, "-m", "gpu1"), gpus=1, random=random, shares=shares)


def most_ranks(gpus: int) -> int:
    """Return the number of ranks of tests that have a number of their own, on so many GPUs."""
    return max((count for count in COUNTS if count <= gpus), default=COUNTS[0])


def of_ranks(name: str, seconds: int, *pytest: str) -> list[Step]:
    """Return a step of random layers for each number of ranks, which stands in its name for RANKS."""
    return [
        Step(name.replace(RANKS, str(count)), seconds, (*pytest, "-m", f"gpu{count}"), gpus=count, random=True)
        for count in COUNTS
    ]


def nvlink(name: str, kind: str) -> list[Step]:
    """Return the steps that every backend and kind of windows must pass."""
    cases, lost = f"{NVLINK}_random_cases_match_the_reference", f"{NVLINK}_survivors_name_the_rank_and_go_on"
    return [
        Step(f"{name}.cases", 150, (f"{cases}[{kind}-{RANKS}]",), gpus=2, random=True),
        Step(f"{name}.graph", 60, (f"{NVLINK}_graph_replay[{kind}]",), gpus=2),
        Step(f"{name}.lost", 90, (f"{lost}[{kind}-killed]", f"{lost}[{kind}-silent]"), gpus=2),
    ]


def sanitized(tool: str) -> Step:
    """Virtual ranks under compute-sanitizer."""
    options, tests = TOOLS[tool]
    what = ("--under-sanitizer", "tests/gpu/test_virtual_ranks.py", "-k", tests)
    return Step(tool, 400, what, gpus=1, before=(*SANITIZER, tool, *options), cases=40)


def compiling(name: str, *words: str) -> Step:
    """Kernels, by all cores at once, before ranks would, each for itself."""
    command = (sys.executable, "-m", "tests.gpu.compile", str(CASES), *words)
    return Step(name, 300, gpus=0, command=command, random=True)


def measure(name: str, seconds: int, words: str) -> Step:
    """moecomm bench, with its JSON among the logs."""
    command = (sys.executable, "-m", "moecomm_bench", *words.split(), "--json", str(LOGS / f"{name}.json"))
    return Step(name, seconds, command=command)


PARTS: dict[str, list[Step]] = {
    "compile": [
        compiling("compile", "--ranks", RANKS),
        compiling("compile2", "--domains", "--ranks", GPUS),
        Step("compile3", 200, gpus=0, command=(sys.executable, "-m", "tests.gpu.compile_verified")),
    ],
    "virtual": [
        one("virtual", 450, "tests/gpu/test_virtual_ranks.py"),
        one("sequences", 100, "tests/gpu/test_sequences.py", random=False),
        one("suspension", 200, "tests/gpu/test_suspension.py", random=False, shares=False),
        one("capacity", 200, "tests/gpu/test_capacity.py", random=False),
        one("kept", 300, "tests/gpu/test_kept_outputs.py", random=False, shares=False),
        one("growth", 100, "tests/gpu/test_growth.py", random=False),
        one("flight", 100, "tests/gpu/test_flight_record.py", random=False),
        one("routing", 60, "tests/gpu/test_routing.py", random=False),
        one("masks", 300, "tests/gpu/test_masks.py", random=False),
        one("membership", 300, "tests/gpu/test_membership.py", random=False),
        one("in-window", 150, "tests/gpu/test_in_window.py", random=False),
        one("verify", 200, "tests/gpu/test_verify.py", random=False),
        one("invariance", 300, "tests/gpu/test_batch_invariance.py", random=False),
        one("counters", 100, "tests/gpu/test_counters.py", random=False),
        one("trace", 150, "tests/gpu/test_trace.py", random=False),
    ],
    "moe": [
        one("gemm", 200, "tests/gpu/test_grouped_gemm.py"),
        one("moe", 400, MOE, "-k", f"not ({FUSED})"),
        *of_ranks(f"moe{RANKS}", 300, MOE, "-k", f"not ({FUSED})"),
    ],
    "fused": [
        one("fused", 600, MOE, "-k", FUSED),
        one("models", 300, "tests/gpu/test_models.py", random=False),
        *of_ranks(f"fused{RANKS}", 450, MOE, "-k", FUSED),
    ],
    "fp8": [
        one("casts", 60, "tests/gpu/test_casts.py", random=False),
        one("cast-wires", 200, "tests/gpu/test_cast_wires.py", random=False),
        one("casts-on-the-way", 300, "tests/gpu/test_casts_on_the_way.py"),
        one("gemm-fp8", 200, "tests/gpu/test_grouped_gemm_fp8.py", random=False),
        one("gemm-mxfp4", 300, "tests/gpu/test_grouped_gemm_mxfp4.py", random=False),
        one("gemm-packed-mxfp4", 300, "tests/gpu/test_grouped_gemm_packed_mxfp4.py", random=False),
        one("gemm-channels", 300, "tests/gpu/test_grouped_gemm_channels.py", random=False),
        one("moe-channels", 500, "tests/gpu/test_moe_channels.py", random=False),
        one("moe-fp8", 700, "tests/gpu/test_moe_fp8.py"),
        *of_ranks(f"moe{RANKS}-fp8", 480, "tests/gpu/test_moe_fp8.py"),
    ],
    "integrations": [
        one("plain", 100, "tests/gpu/test_plain_kernels.py", random=False),
        one("ops", 200, "tests/gpu/test_ops.py", random=False),
        one("same-bits", 200, "tests/integrations/test_same_bits_on_gpus.py", random=False),
        Step("deep_ep", 200, ("tests/compat/test_on_gpus.py",), gpus=2),
        Step("vllm", 300, ("tests/integrations/test_vllm_on_gpus.py",)),
        Step("megatron", 600, ("tests/integrations/test_megatron_on_gpus.py",)),
    ],
    "nvlink": [
        *nvlink("vmm", "vmm"),
        *nvlink("nccl", "nccl"),
        Step("masks2", 200, ("tests/gpu/test_masks.py", "-m", "gpu2"), gpus=2),
        Step("suspension2", 200, ("tests/gpu/test_suspension.py", "-m", "gpu2"), gpus=2),
        Step("capacity2", 200, ("tests/gpu/test_capacity.py", "-m", "gpu2"), gpus=2),
        Step("growth2", 400, ("tests/gpu/test_growth.py", "-m", "gpu2"), gpus=2),
    ],
    "windows": [
        one("windows", 200, "tests/gpu/test_windows.py", random=False),
        one("memory", 100, "tests/backends/test_windows_on_gpus.py", random=False),
        Step("windows2", 400, ("tests/gpu/test_windows.py", "-m", "gpu2"), gpus=2),
        Step("expert-weights", 300, ("tests/gpu/test_expert_weights.py", "-m", "gpu2"), gpus=2),
        Step("weight-transfer", 400, ("tests/gpu/test_weight_transfer.py", "-m", "gpu2"), gpus=2),
        Step("slot-weights", 300, ("tests/gpu/test_slot_weights.py", "-m", "gpu2"), gpus=2),
        Step("memory2", 400, ("tests/backends/test_windows_on_gpus.py", "-m", "gpu2"), gpus=2),
    ],
    "overlap": [
        Step("compile-overlap", 200, gpus=0, command=(sys.executable, "-m", "tests.gpu.compile_overlap", GPUS)),
        one("overlap", 300, "tests/gpu/test_overlap.py", random=False),
        one("gather-study", 150, "tests/gpu/test_gather_study.py", random=False),
        Step("overlap2", 480, ("tests/gpu/test_overlap.py", "-m", "gpu2"), gpus=2),
        Step("gather-study2", 150, ("tests/gpu/test_gather_study.py", "-m", "gpu2"), gpus=2),
    ],
    "stress": [Step("stress", 300, ("tests/gpu/test_stress.py",), gpus=2)],
    "bench": [
        Step("bench", 900, ("tests/bench/test_on_gpus.py",)),
        Step("bench1", 150, ("tests/bench/test_dispatch_combine.py", "-m", "gpu1"), gpus=1),
        Step("bench2", 300, ("tests/bench/test_latency.py", "tests/bench/test_ceiling.py", "-m", "gpu2"), gpus=2),
    ],
    "domains": [*nvlink("domains", "vmm, 2 domains"), *nvlink("domains4", "vmm, 4 domains")],
    # Where nvcc or the headers of NCCL and NVSHMEM are missing these skip, as they do on most machines without a GPU.
    "shims": [Step("shims", 900, ("tests/shims",), gpus=0)],
    "nvshmem": [
        *nvlink("nvshmem", "nvshmem"),
        *nvlink("nvshmem2", "nvshmem, 2 domains"),
        *nvlink("nvshmem-network", "nvshmem network, 2 domains"),
        Step("nvshmem.masks", 200, ("tests/gpu/test_masks_over_networks.py", "-k", "nvshmem")),
        Step("nvshmem.torch", 300, (f"{TORCH}_nvshmem_that_torch_has_initialised_is_joined",)),
    ],
    "gin": [
        Step("plugin", 300, ("tests/rma_plugin/test_on_gpus.py",), gpus=2),
        *nvlink("gin", "gin"),
        *nvlink("gin2", "gin, 2 domains"),
        *nvlink("gin4", "gin, 4 domains"),
        Step("gin.masks", 200, ("tests/gpu/test_masks_over_networks.py", "-k", "gin")),
        Step("gin.apart", 300, ("tests/gpu/test_plugin_connections.py",)),
        Step("gin.torch", 300, (f"{TORCH}_all_reduce_of_torch_is_right_beside_gin",)),
    ],
    "sanitize": [sanitized(tool) for tool in TOOLS],
    "measure": [
        measure(
            "latency-backends", 400, f"latency --backend {BACKENDS} --least-bytes 4 --most-bytes 4194304 --replays 9"
        ),
        measure("backends", 1500, f"dispatch-combine --backend {BACKENDS} --domain-ranks 0,2 {ROUNDS}"),
    ],
    "layers": [
        Step("compile-models", 200, gpus=0, command=(sys.executable, "-m", "tests.gpu.compile_models", GPUS, *MODELS)),
        *(
            measure(f"moe-{model}", 150, f"moe --model {model} --ranks {GPUS} --tokens {tokens} --fp8 --replays 7")
            for model, tokens in MODELS.items()
        ),
    ],
}
ONLY_WHERE_NAMED = ("sanitize", "measure", "layers")


def run(step: Step, logs: Path, gpu: str | None = None, threads: int | None = None) -> bool:
    """Runs a step, on one GPU or on all, with so many threads of torch on the CPU, and says how it went."""
    begin, log, gpus = time.monotonic(), logs / f"{step.name}.log", len(all_gpus())
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    visible |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    words = [str(gpus) if word == GPUS else word.replace(RANKS, str(most_ranks(gpus))) for word in step.words]
    with log.open("wb") as out:
        try:
            status = processes.run(words, out, step.limit_s, env={**os.environ, **ENVIRONMENT, **visible})
        except OSError as error:
            out.write(str(error).encode())
            status = None
    fine = status == 0
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    word, seconds = "ok" if fine else "FAILED", time.monotonic() - begin
    # One write: print() writes the end of a line separately, and a concurrent step could write in between.
    sys.stdout.write(f"{step.name:<20} {word:<6} {seconds:4.0f} s  {lines[-1][:120] if lines else ''}\n")
    sys.stdout.flush()
    passed.note(logs, step.name, fine, bool(step.pytest), lines[-1] if lines else "", seconds)
    return fine
