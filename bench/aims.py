"""Marks behind the results that rows of "Aims that are not reached" name, on the page of decisions."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from typing import Any

from tables import CALLS, DOMAINS, LAYER, LAYER_CALLS, OLDER, ROOT, ROUNDS, THROUGH, load, names, older

PAGE = ROOT / "docs" / "maintainers" / "decisions.md"
HEAD = "## Aims that are not reached\n"
_NAMED = re.compile(rf"`([a-z][\w*-]*)\.json`(?: {OLDER})?")
_EVERY = tuple(dict.fromkeys(part for parts in THROUGH.values() for part in parts))
# Parts of what a result measured, by its benchmark, or by the begin of its name.
_PARTS = {
    "moe": (*LAYER, "forms"),
    "placed-layers": (*LAYER, "forms"),
    "layers": LAYER,
    "tune-layers": LAYER,
    "gemm": ("GEMM",),
    "overlap": ("overlap",),
    "backends": (*ROUNDS, *DOMAINS, *_EVERY),
    "latency-backends": ("put + signal", "gin", "nvshmem", "RMA plugin"),
    "decode": ROUNDS,
    "deep-ep-layer": (*ROUNDS, *CALLS, "deep_ep"),
    "training": (*LAYER, *LAYER_CALLS),
    "counters": ROUNDS,
    "virtual-ranks": ROUNDS,
    "kill-plans": ("membership", *ROUNDS),
    "megatron-training-h200": ROUNDS,
    "megatron-training": ("host",),
    "torchtitan-training-h200": ROUNDS,
    "torchtitan-training": ("host",),
    "transformers-generation": ROUNDS,
    "sglang": ROUNDS,
    "transfer-cpu": ("transfer by CPUs",),
    "transfer": ("transfer",),
    "balanced-rounds": (),
    "simulate": (),
    "simulate-check": (),
    "accuracy": (),
}


def parts_of(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the parts behind all times of a result: see tables.older."""
    if found.get("benchmark") == "dispatch-combine":
        case = found["case"]
        way = "emulated NIC" if case.get("nic") else found["backend"].split("/")[0]
        parts = (*DOMAINS, *THROUGH[way]) if case.get("domain_ranks") else ROUNDS
        return (*parts, *CALLS) if case["mode"] == "eager" else parts
    if name == "kill-plans-cpu":
        return ("membership", "host")
    kinds = [found.get("benchmark") or name, *(begin for begin in _PARTS if name.startswith(begin))]
    known = [_PARTS[kind] for kind in kinds if kind in _PARTS]
    assert known, f"{name}: say in _PARTS what its times depend on"
    return known[0]


def marked(page: str) -> str:
    """Return the page with a mark behind each name of a result, or of several, of which one is older than its parts."""
    before, head, section = page.partition(HEAD)
    assert head, f"no {HEAD}"

    def with_mark(match: re.Match[str]) -> str:
        some = [name for name in names() if fnmatch(name, match[1])]
        assert some, f"no result: {match[1]}"
        mark = f" {OLDER}" if any(older(found := load(name), parts_of(name, found)) for name in some) else ""
        return f"`{match[1]}.json`{mark}"

    return before + head + _NAMED.sub(with_mark, section)
