"""The pieces of tests/gpu/run figures: a command for each result."""

from __future__ import annotations

import sys
from dataclasses import dataclass

# In a command: the number of GPUs, a half and a quarter of it (at least 1), and the folder of results.
GPUS, HALF, QUARTER, FOLDER = "GPUS", "HALF", "QUARTER", "FOLDER"
DEEPSEEK = f"--model deepseek-v3 --ranks {GPUS}"
CASES = f"dispatch-combine {DEEPSEEK} --payload bf16,fp8"
FLAT = f"{CASES} --layout flat --no-peers"
QWEN = f"dispatch-combine --model qwen3-235b --ranks {GPUS} --payload bf16,fp8"
PEERS = "--layout flat,expert,batched --replays 20 --no-ceiling --others deep_ep,nccl_ep,flashinfer"
OF_DOMAINS = f"dispatch-combine {DEEPSEEK} --tokens 128,4096 --no-ceiling --no-peers"
TWO_DOMAINS = f"{OF_DOMAINS} --domain-ranks {HALF}"
FOUR_DOMAINS = f"{OF_DOMAINS} --domain-ranks {QUARTER} --backend lsa --sms 32"
ZIPF = f"{FOLDER}/zipf.routing"
RECORDED = "bench/routing/byte-model.routing"  # in a command: the file, wherever that runs
# 4 ranks with 1024 tokens each replay one layer of the file; the next input replays the next layer.
LIKE_RECORDED = (
    f"dispatch-combine --model gpt-oss-120b --ranks {GPUS} --payload bf16,fp8 --tokens 128,1024 --layout flat,expert "
    "--replays 10 --no-peers"
)


@dataclass(frozen=True)
class Piece:
    """A measurement of one result.

    Attributes:
        name: beginning of the result's name.
        seconds: the time limit, after which the command is ended.
        words: a command of moecomm bench; or `tune ...`; or a program of bench/; or a module of tests.
        before: a command to run before it.
        gpus: the least number of GPUs; a piece with 1 uses one GPU, and its result is NAME-GPU.
    """

    name: str
    seconds: int
    words: str
    before: str = ""
    gpus: int = 2


def _layers(model: str, seconds: int, tokens: str) -> Piece:
    words = f"moe --model {model} --ranks {GPUS} --tokens {tokens} --fp8 --replays 7"
    return Piece(f"moe-{model}", seconds, words)


PIECES = (
    Piece("times-few", 220, f"{CASES} --tokens 1,128 --layout flat,expert,batched --replays 15"),
    Piece("times-many", 180, f"{CASES} --tokens 4096 --layout flat,expert,batched --replays 10"),
    Piece("decode", 100, f"decode {DEEPSEEK} --tokens 1,128 --layout flat,expert,batched --payload fp8"),
    Piece(
        "zipf",
        80,
        f"{CASES} --tokens 4096 --layout flat,expert --replays 10 --routing {ZIPF}",
        before=f"{sys.executable} -m moecomm routing synthesize {ZIPF} --model deepseek-v3 --zipf 0.8 --tokens 131072",
    ),
    Piece("recorded", 80, f"{LIKE_RECORDED} --routing {RECORDED}"),
    Piece("recorded-even", 80, LIKE_RECORDED),
    # Other libraries in pieces of their own, because they may hang.
    Piece("peers", 480, f"{CASES} --tokens 128,4096 --sms 0,16,64,128 {PEERS}"),
    Piece("peers-qwen3", 480, f"{QWEN} --tokens 128,4096 {PEERS}"),
    Piece("peers-one", 300, f"{CASES} --tokens 1 {PEERS}"),
    Piece("peers-qwen3-one", 300, f"{QWEN} --tokens 1 {PEERS}"),
    # NCCL EP compiles a kernel for each payload, layout, size and number of SMs.
    Piece(
        "formats-peers",
        400,
        f"dispatch-combine {DEEPSEEK} --tokens 128,8192 --layout flat "
        "--payload bf16,fp8-given,mxfp8-given,fp8_token-given,int8_token-given,nvfp4-given "
        "--replays 9 --no-ceiling --others nccl_ep,flashinfer",
    ),
    Piece("training", 100, f"training --model qwen3-235b --ranks {GPUS} --tokens 4096 --replays 7"),
    Piece(
        "layers-peers",
        400,
        f"moe {DEEPSEEK} --tokens 16,128,512,2048,4096,8192 --fp8 --others deep_gemm --replays 7 --singles 0 "
        "--sustained 0",
    ),
    _layers("qwen3-235b", 400, "128,1024,4096,8192"),
    _layers("deepseek-v3", 480, "128,1024,4096,8192"),
    _layers("gpt-oss-120b", 400, "16,128,512,1024,4096"),
    _layers("mixtral-8x7b", 360, "16,128,512,4096"),
    _layers("qwen3-30b-a3b", 300, "128,1024,8192"),
    Piece("decode-gemms", 200, f"decode {DEEPSEEK} --tokens 1,128 --layout expert --payload bf16 --gemms"),
    Piece("eager", 100, f"{CASES} --tokens 128,4096 --layout flat,expert --mode eager --singles 0 --no-peers"),
    Piece("ht", 150, f"{FLAT} --tokens 4096,8192 --sms 0,16,64 --replays 9"),
    Piece("few-sms", 100, f"{FLAT} --tokens 4096 --sms 0,16,24,64 --replays 7"),
    Piece("skew", 80, f"{FLAT} --tokens 4096 --skew --replays 7"),
    Piece("cold", 80, f"{FLAT} --tokens 128,4096 --cold --replays 9"),
    Piece("qwen3", 200, f"{QWEN} --layout flat --no-peers --tokens 128,4096,8192 --sms 0,16 --replays 7"),
    Piece(
        "latency-backends", 400, "latency --backend lsa,nvshmem,gin --least-bytes 4 --most-bytes 4194304 --replays 9"
    ),
    Piece(
        "backends",
        300,
        f"dispatch-combine {DEEPSEEK} --backend lsa,nvshmem,gin --tokens 128,4096 --layout flat --payload bf16 "
        "--replays 5 --limit 40",
    ),
    Piece(
        "backends-domains",
        480,
        f"{TWO_DOMAINS} --backend lsa,nvshmem,gin --layout flat --payload bf16,fp8 --replays 7 --limit 70",
    ),
    # The line that `moecomm bench plot` draws over the number of domains: one, two, and one a GPU.
    Piece(
        "domain-counts",
        200,
        f"dispatch-combine {DEEPSEEK} --domain-ranks 0,{HALF},1 --backend lsa --tokens 4096 --layout flat "
        "--payload bf16 --replays 7 --limit 60 --no-ceiling --no-peers",
        gpus=4,
    ),
    Piece("domains", 300, f"{TWO_DOMAINS} --backend lsa --sms 0,32,64 --replays 10"),
    Piece("domains-nvshmem", 340, f"{TWO_DOMAINS} --backend lsa,nvshmem --sms 32 --layout flat --limit 80"),
    Piece("gin-domains", 200, f"{TWO_DOMAINS} --backend gin --layout flat --payload bf16,fp8 --replays 10"),
    Piece("nic", 120, f"{TWO_DOMAINS} --backend lsa --sms 32 --payload bf16 --nic 50,3,10 --replays 10"),
    Piece("four-domains", 200, f"{FOUR_DOMAINS} --replays 10", gpus=4),
    Piece("four-domains-nic", 200, f"{FOUR_DOMAINS} --payload bf16 --nic 50,3,10 --replays 10", gpus=4),
    Piece("sweep", 200, f"sweep {DEEPSEEK} --no-peers --replays 10"),
    Piece("all-to-all", 60, f"all-to-all --ranks {GPUS}"),
    Piece("beside", 100, f"{CASES} --tokens 4096 --layout flat --sms 16 --overlap-gemm --singles 0 --no-peers"),
    Piece("deep-ep-layer", 120, f"deep-ep-layer {DEEPSEEK} --tokens 128,4096"),
    Piece("deep-ep-layer-eager", 200, f"deep-ep-layer {DEEPSEEK} --tokens 128,4096 --mode eager"),
    *(
        Piece(
            f"overlap-{name}", 90, f"overlap --ranks {GPUS} --limit 50 --replays 5 --operator {name.replace('-', '_')}"
        )
        for name in (
            "all-gather-matmul",
            "matmul-reduce-scatter",
            "matmul-all-reduce",
            "matmul-all-to-all",
            "embedding-all-to-all",
        )
    ),
    Piece("all-gather-study", 150, f"all-gather-study --ranks {GPUS}"),
    Piece("placed-layers", 400, f"placed_layers.py --ranks {GPUS}"),
    Piece("transfer", 100, f"transfer --ranks {GPUS} --experts 32 --replays 9"),
    Piece("moving-weights", 300, f"moving_weights.py --ranks {GPUS}"),
    Piece("kill-plans", 300, f"tests.gpu.kills 20 --ranks {GPUS}"),
    Piece("kill-plans-all-gpus", 400, f"tests.kill_plans 2000 --gpus --most-ranks {GPUS} --jobs 2 --minutes 4"),
    Piece(
        "tune-layers", 400, f"tune layers --ranks {GPUS} --tokens 128,1024,4096 --replays 5 --out {FOLDER}/layers.tune"
    ),
    Piece("gemm-fp8", 150, "gemm --model deepseek-v3 --ranks 4 --tokens 128,1024,8192 --dtype bf16,fp8", gpus=1),
    Piece(
        "gemm-tune",
        200,
        f"tune gemms --model deepseek-v3 --ranks 4 --rows 8,128,1024 --out {FOLDER}/gemms.tune",
        gpus=1,
    ),
    Piece(
        "rows-wire",
        120,
        "moe --model qwen3-30b-a3b --ranks 1 --tokens 128,4096 --rows-wire --no-peers --replays 7 --singles 0 "
        "--sustained 0",
        gpus=1,
    ),
    Piece("virtual-ranks", 200, "virtual_ranks.py", gpus=1),
)

_SMALL = "--hidden 64 --experts 8 --topk 2 --tokens 3 --ranks 2 --backend host"
_INNER = f"{_SMALL} --intermediate 32"
# Options that make a piece small, by its command; the later of two equal options counts. Commands that are not here
# need a GPU.
MINIATURES = {
    "dispatch-combine": f"{_SMALL} --layout flat --payload bf16 --sms 1 --mode eager --replays 1 --singles 2 "
    "--limit 60 --no-ceiling",
    "decode": f"{_INNER} --layout flat --payload bf16 --layers 2 --steps 2",
    "training": f"{_INNER} --layers 2 --replays 1",
    "moe": f"{_INNER} --replays 1 --singles 2",
    "transfer": "--hidden 64 --intermediate 32 --experts 4 --ranks 2 --backend host --cast bf16,fp8 --replays 1",
    "latency": "--backend host --least-bytes 4 --most-bytes 8 --replays 1",
    "sweep": f"{_SMALL} --replays 1 --no-ceiling",
    "all-to-all": "--backend host --ranks 2 --part-bytes 8192",
    "deep-ep-layer": f"{_SMALL} --replays 1 --mode eager",
    "moving_weights.py": "--ranks 2 --held 2 --hidden 64 --inner 32 --topk 2 --tokens 8,32 --layers 2 --steps 30",
}


def has_miniature(piece: Piece) -> bool:
    """Return whether a piece runs on CPU ranks, which also lack an emulated NIC."""
    words = piece.words.split()
    return words[0] in MINIATURES and "--nic" not in words
