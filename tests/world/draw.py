"""Random cases from a seed."""

from __future__ import annotations

import random
from typing import Any

from .calls import ROUND_CALLS
from .case import ROUTINGS, Case, Step
from .model import ACTIVATIONS
from .payloads import QUANTIZED

STEPS = (12, 36)
FAULTS = 0.14  # of a round
AFTER_BAD = 0.7  # of bad ids are followed by a loss, so that nothing of the failed round helps
EXTRAS = ("int64 1", "float32 3", "uint8 5", "int16 2", "float64 1")
PAYLOADS = (
    *["plain"] * 6,
    *(f"quantize {name}" for name in QUANTIZED),
    "quantize fp8 ue8m0",
    "given fp8",
    "given int8_group",
    "bytes uint8 5",
    "bytes int32 4",
    "bytes int16 6",
    "scaled float32 2",
    "scaled uint8 3",
)
WIRES = (None, None, "exact", "exact", "rows", "fp8", "int8")
THEN = ("shrink", "shrink", "shrink, ids kept", "mask", "reopen")
OTHERS = (
    ("place", 6),
    ("weights", 9),
    ("move", 12),
    ("slot weights", 4),
    ("mask", 3),
    ("unmask", 4),
    ("shrink", 3),
    ("grow", 12),
    ("release", 2),
    ("restore", 4),
    ("check kept", 6),
    ("drop", 3),
    ("stats", 4),
)


def draw_sizes(rng: random.Random, ranks: int) -> dict[str, Any]:
    """Draw the arguments of a Buffer."""
    dtype = rng.choice(["bfloat16", "bfloat16", "float16", "float32"])
    experts = ranks * rng.choice([1, 2, 2, 3]) + rng.choice([0, 0, 1])
    sizes: dict[str, Any] = {
        "hidden": rng.choice([64, 64, 32, 128, 24]),
        "num_experts": experts,
        "topk": rng.choice([1, 2, 2, 3, 4]),
        "max_tokens": rng.choice([3, 8, 12]),
        "dtype": dtype,
        "capacity_factor": rng.choice([None, None, 0.4, 1.0]),
        "verify_every": rng.choice([0, 0, 0, 1, 3]),
    }
    choice = rng.choice([None, None, "token", "nearest", "balanced", "balanced"])
    if choice != "balanced" and ranks % 2 == 0 and ranks > 2 and rng.random() < 0.3:
        sizes["domain_ranks"] = 2
    if choice is not None:
        sizes["placement"] = {"seed": rng.randrange(1000), "spare": rng.choice([0, 0, 1, 2, 3]), "choice": choice}
    return sizes


def draw_case(seed: int, most_ranks: int = 8) -> Case:
    """Draw the case of a seed."""
    rng = random.Random(f"world {seed}")
    ranks = min(most_ranks, rng.choice([1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 8]))
    count = rng.randint(*STEPS)
    sizes, steps = draw_sizes(rng, ranks), list[Step]()
    while len(steps) < count:
        steps.append(draw_step(rng))
        if steps[-1].fault and steps[-1].fault[0] == "bad id" and rng.random() < AFTER_BAD:
            call = rng.choice(["dispatch", "moe", "ops"])
            other = steps[-1].fault[1] + 1
            fault = rng.choice([("close", other, ""), ("close", other, ""), ("abort", other, "0.3")])
            steps.append(Step(call, rng.randrange(1 << 20), draw_options(rng, call), fault, rng.choice(THEN)))
    return Case(seed, ranks, sizes, tuple(steps))


def draw_step(rng: random.Random) -> Step:
    """Draw one step."""
    seed = rng.randrange(1 << 20)
    if rng.random() < 0.4:
        names, weights = zip(*OTHERS, strict=True)
        call = rng.choices(names, weights)[0]
        fault: tuple[str, int, str] | None = None
        if call in ("weights", "slot weights", "place") and rng.random() < 0.3:
            whats = {"weights": ("order", "shapes", "dtypes"), "slot weights": ("dtypes", "count"), "place": ("",)}
            fault = ("differ", rng.randrange(8), rng.choice(whats[call]))
        if call == "stats" and seed % 2:
            fault = (("left out", "bad one")[seed // 2 % 2], seed // 4 % 8, "")
        options = {"leaves": rng.random() < 0.6, "rounds": rng.random() < 0.5}
        return Step(call, seed, options, fault, rng.choice(THEN))
    call = rng.choices(list(ROUND_CALLS), (8, 6, 3, 4, 3, 2))[0]
    return Step(call, seed, draw_options(rng, call), draw_fault(rng, call), rng.choice(THEN))


def draw_options(rng: random.Random, call: str) -> dict[str, Any]:
    """Draw the options of a round; those of other calls are ignored."""
    options: dict[str, Any] = {"routing": rng.choice(ROUTINGS), "layout": rng.choice(["expert", "flat", "batched"])}
    if call == "dispatch":
        options |= {
            "payload": rng.choice(PAYLOADS),
            "extras": rng.sample(EXTRAS, rng.choice([0, 0, 0, 1, 2])),
            "alignment": rng.choice([1, 1, 2, 8]),
            "begin": rng.random() < 0.2,
            "between": rng.random() < 0.5,
            "room": rng.choice(["", "", "", "enough", "few", "drop", "chunks"]),
            "workers": rng.choice([0, 0, 1, 2]),
        }
    options |= {"kept": rng.randrange(3), "wire": rng.choice(WIRES)}
    if call == "combine":
        options |= {
            "weighted": rng.random() < 0.8,
            "bias": rng.choice(["", "", "one", "rows"]),
            "y": rng.choice(["", "", "", "float32", "bfloat16"]),
            "inside": rng.random() < 0.3,
            "out": rng.random() < 0.3,
            "own weights": rng.random() < 0.2,
        }
    if call in ("moe", "ops moe"):
        options |= {
            "activation": rng.choice(ACTIVATIONS),
            "biases": rng.random() < 0.3,
            "bias": rng.random() < 0.3,
            "format": rng.choice(["plain", "plain", "fp8", "fp8 channels", "int8 channels", "mxfp4", "packed mxfp4"]),
            "own weights": rng.random() < 0.6,
            "replicate": rng.random() < 0.6,
            "interleaved": rng.random() < 0.2,
        }
    if call == "ops":
        options |= {"quantize": rng.random() < 0.2, "layer": rng.choice([0, 0, 3])}
    return options


def draw_fault(rng: random.Random, call: str) -> tuple[str, int, str] | None:
    """Draw what goes wrong in a round; mostly nothing."""
    if rng.random() >= FAULTS:
        return None
    kinds = ("bad all", "bad one", "bad id", "differ", "close", "kill", "abort", "interrupt")
    kind = rng.choices(kinds, (2, 2, 4, 5, 4, 2, 1, 1))[0]
    what = ""
    if kind in ("bad all", "bad one"):
        what = str(rng.randrange(8))
    if kind == "differ":
        what = rng.choice(list(ROUND_CALLS[call].differ) or [""])
    if kind in ("abort", "interrupt"):
        what = str(rng.choice([0, 0.1, 0.3, 1, 3]))
    if kind == "kill":
        what = rng.choice(["", "later"])
    return kind, rng.randrange(8), what
