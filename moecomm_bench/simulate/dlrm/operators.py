"""Measured rows of `moecomm bench overlap` that the terms are fitted to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moecomm_bench import schema
from moecomm_bench.simulate.dlrm.shape import ITEM_BYTES, Lookups, Product

LEAST_ROWS = 128  # a training step has no product of fewer rows
COPIED = "NCCL's time of `matmul_all_to_all` with several experts, which copies tiles as no embedding does"


@dataclass(frozen=True)
class MeasuredCase:
    """The times of one case by each way ("moecomm", "nccl", "alone"), and its work on one rank.

    Attributes:
        lookups: for an embedding; else None.
        product: for a product; else None.
        sent: bytes of the tensor that NCCL exchanges or reduces.
    """

    file: str
    operator: str
    case: str
    dtype: str
    us: dict[str, float]
    lookups: Lookups | None
    product: Product | None
    sent: int

    @property
    def nccl_us(self) -> float:
        """Time that NCCL's way takes longer than the product or the bags alone."""
        return self.us["nccl"] - self.us["alone"]


def read(paths: Iterable[Path], gpu: str, ranks: int) -> tuple[list[MeasuredCase], list[dict[str, Any]]]:
    """Return the cases of so many ranks on such GPUs, and the origin of their files.

    Args:
        paths: results of the benchmark; those of other benchmarks, GPUs or numbers of ranks are passed over.
        gpu: name of the GPU.
        ranks: number of ranks.
    """
    found, origins = [], []
    for path in paths:
        result = schema.read(path)
        if result.get("benchmark") != "overlap" or (result["machine"]["gpus"][0], result["ranks"]) != (gpu, ranks):
            continue
        cases = list(_cases(path.name, result))
        if cases:
            found += cases
            origins.append({"file": path.name, "date": result["date"], "commit": result["commit"]})
    return found, origins


def _cases(file: str, result: dict[str, Any]) -> Iterable[MeasuredCase]:
    by_case: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in result["rows"]:
        if "us" in row and row["dtype"] != "fp8":  # products in FP8 have another speed, and the model has none
            key = row["operator"], row["case"], row["dtype"]
            by_case.setdefault(key, {"shapes": row["shapes"], "us": {}})["us"][row["who"]] = row["us"]["p50"]
    for (operator, case, dtype), one in by_case.items():
        lookups, product = _work(operator, dtype, one["shapes"], result["ranks"])
        if product is None or product.rows >= LEAST_ROWS:
            sent = sum(work.out_bytes for work in (lookups, product) if work is not None)
            yield MeasuredCase(file, operator, case, dtype, one["us"], lookups, product, sent)


def _work(operator: str, dtype: str, shapes: list[list[int]], ranks: int) -> tuple[Lookups | None, Product | None]:
    x, w = shapes
    if operator == "embedding_all_to_all":
        tables, _, columns = x
        return Lookups(tables, w[1], w[2], columns, ITEM_BYTES[dtype]), None
    if operator == "matmul_all_to_all":
        return None, Product(x[1] * x[2], w[1], w[2], x[0])
    return None, Product(x[0] * (ranks if operator == "all_gather_matmul" else 1), w[0], w[1])
