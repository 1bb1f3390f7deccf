"""tests/gpu/run eight [OPTIONS of figures]: the pieces and the steps for several GPUs, the most valuable first.

For 8 GPUs of one host; any number works.  None takes longer than 8 minutes.  See figures.py: what has a result of this
commit, or has passed at it, is skipped, so call again until nothing is left.
"""

from __future__ import annotations

from tests.gpu.pieces import PIECES, Piece
from tests.gpu.steps import PARTS, RANKS, Step, most_ranks

LONGEST_S = 480  # of a piece or a step
# Names of pieces and of steps.
ORDER = (
    # Other libraries beside moecomm: in a graph, alone and eager.
    *("peers", "peers-qwen3", "peers-one", "peers-qwen3-one"),
    # Whole layers beside torch's.
    *("moe-deepseek-v3", "moe-qwen3-235b"),
    # Domains: two, and four.
    *("domains", "nic", "four-domains", "four-domains-nic", "domain-counts", "backends-domains"),
    # Random cases, graph replays of which each is compared, and kills.
    *("vmm.cases", "nccl.cases", "domains.cases", "domains4.cases", "stress"),
    *("vmm.graph", "nccl.graph", "domains.graph", "domains4.graph"),
    *(f"moe{RANKS}", f"fused{RANKS}", f"moe{RANKS}-fp8"),
    *("vmm.lost", "domains.lost", "masks2", "kill-plans", "kill-plans-all-gpus"),
    *("gin4.cases", "gin4.graph", "nvshmem2.cases", "nvshmem2.graph"),
    # Steps of models, skewed routing with balance and without, overlapped operators, Windows.
    *("decode", "decode-gemms", "training", "zipf", "placed-layers", "moving-weights"),
    *("overlap-all-gather-matmul", "overlap-matmul-reduce-scatter", "overlap-matmul-all-reduce"),
    *("overlap-matmul-all-to-all", "overlap-embedding-all-to-all"),
    *("windows2", "memory2", "expert-weights", "slot-weights"),
    # Other rows that the model of `moecomm simulate` is fitted to.
    *("times-few", "times-many", "ht", "qwen3", "few-sms", "skew", "cold", "sweep", "all-to-all"),
)


def order(gpus: int) -> list[Piece | Step]:
    """Return what there is to run on so many GPUs: ORDER, then the other pieces for several GPUs."""
    known: dict[str, Piece | Step] = {step.name: step for part in PARTS.values() for step in part}
    known |= {piece.name: piece for piece in PIECES}
    chosen = [known[name.replace(RANKS, str(most_ranks(gpus)))] for name in ORDER]
    return [*chosen, *(piece for piece in PIECES if piece.gpus > 1 and piece not in chosen)]
