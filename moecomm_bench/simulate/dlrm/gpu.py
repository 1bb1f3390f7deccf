"""Times of one GPU and of NCCL over NVLink: terms fitted to measurements."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from moecomm.base.documents import Document
from moecomm_bench.schema import Name
from moecomm_bench.simulate.dlrm.shape import Lookups, Product

SHIPPED = "h100.json"
# Data sheet of the H100 SXM: what terms are scaled by for another GPU.
DATA_SHEET_GBS, DATA_SHEET_TFLOPS = 3350.0, 989.0
_SHARPNESS = 4  # of the larger of two concurrent parts, as in moecomm_bench.simulate.domain


def together(*parts: float) -> float:
    """Return the time of parts that run concurrently: a little more than the longest."""
    return float(sum(part**_SHARPNESS for part in parts) ** (1 / _SHARPNESS))


@dataclass(frozen=True)
class FusedBags:
    """The kernel of embedding_all_to_all, and its gather alone.

    Attributes:
        fixed_us: a launch with its ends.
        hbm_gbs: memory bandwidth for random rows.
        row_ns: for each row, however short.
        wire_gbs: stores to peers over NVLink, one direction.
    """

    fixed_us: float
    hbm_gbs: float
    row_ns: float
    wire_gbs: float

    def memory_us(self, lookups: Lookups, moved: float) -> float:
        """Return the time of reading rows, and of moving `moved` bytes of sums through memory; no launch."""
        return (lookups.read_bytes + moved) / self.hbm_gbs / 1e3 + lookups.count * self.row_ns / 1e3

    def gather_us(self, lookups: Lookups) -> float:
        """Return the time of a kernel that looks up and stores all sums in its own memory."""
        return self.fixed_us + self.memory_us(lookups, lookups.out_bytes)


@dataclass(frozen=True)
class TorchBags:
    """torch's embedding_bag, one call a table: calls, sums written, and the slower of bytes and additions."""

    table_us: float
    output_ps: float
    hbm_gbs: float
    element_ps: float

    def us(self, lookups: Lookups) -> float:
        """Return the time of the bags of all tables."""
        calls = lookups.tables * self.table_us + lookups.bags * lookups.columns * self.output_ps / 1e6
        added = lookups.count * lookups.columns * self.element_ps / 1e6
        return calls + together(lookups.read_bytes / self.hbm_gbs / 1e3, added)


@dataclass(frozen=True)
class Products:
    """cuBLAS, 16 bits: a launch, and the slower of arithmetic and bytes.

    Attributes:
        fixed_us: a launch.
        tflops: arithmetic before the GPU reaches its limit of power.
        hbm_gbs: memory bandwidth.
        sustained: share of `tflops` at that limit.
        burst_us: arithmetic of one kernel before it.
    """

    fixed_us: float
    tflops: float
    hbm_gbs: float
    sustained: float
    burst_us: float

    def us(self, product: Product) -> float:
        """Return the time of a product."""
        return self.work_us(product.flops, product.bytes)

    def work_us(self, flops: float, moved: float) -> float:
        """Return the time of a kernel that computes so much and moves so many bytes."""
        compute_us = flops / self.tflops / 1e6
        compute_us += max(0.0, compute_us - self.burst_us) * (1 / self.sustained - 1)
        return self.fixed_us + together(compute_us, moved / self.hbm_gbs / 1e3)


@dataclass(frozen=True)
class NcclAllToAll:
    """NCCL's all-to-all over NVLink, one direction, and torch's copy of the sums before it."""

    fixed_us: float
    gbs: float
    copy_gbs: float


@dataclass(frozen=True)
class AllReduce:
    """NCCL's all-reduce over NVLink: a ring with this bandwidth in each direction."""

    fixed_us: float
    gbs: float


@dataclass(frozen=True)
class Gpu:
    """A GPU of which all these times are known."""

    name: str
    bags: FusedBags
    torch_bags: TorchBags
    products: Products
    all_to_all: NcclAllToAll
    all_reduce: AllReduce

    def scaled(self, hbm_gbs: float = 0.0, tflops: float = 0.0) -> Gpu:
        """Return a GPU whose data sheet has other figures, and that reaches the same shares of them.

        Args:
            hbm_gbs: memory bandwidth, 1e9 bytes per second; 0: as measured.
            tflops: dense 16-bit matrix arithmetic; 0: as measured.
        """
        memory = hbm_gbs / DATA_SHEET_GBS if hbm_gbs else 1.0
        arithmetic = tflops / DATA_SHEET_TFLOPS if tflops else 1.0
        bags, torch_bags, products = self.bags, self.torch_bags, self.products
        return replace(
            self,
            bags=replace(bags, hbm_gbs=bags.hbm_gbs * memory, row_ns=bags.row_ns / memory),
            torch_bags=replace(torch_bags, hbm_gbs=torch_bags.hbm_gbs * memory),
            products=replace(
                products,
                hbm_gbs=products.hbm_gbs * memory,
                tflops=products.tflops * arithmetic,
                burst_us=products.burst_us / arithmetic,  # the same work
            ),
            all_to_all=replace(self.all_to_all, copy_gbs=self.all_to_all.copy_gbs * memory),
        )


class _Terms(msgspec.Struct):
    bags: FusedBags
    torch_bags: TorchBags
    products: Products
    all_to_all: NcclAllToAll
    all_reduce: AllReduce


class _Fit(msgspec.Struct):
    """The form of a fit, as far as the model reads it."""

    gpu: Name
    terms: _Terms


_FIT = Document("parameters", "JSON that bench/refit.py has written for `dlrm`", dict[str, Any])
_MOST = 1e12  # of a term
PARTS: dict[str, type[Any]] = {
    "bags": FusedBags,
    "torch_bags": TorchBags,
    "products": Products,
    "all_to_all": NcclAllToAll,
    "all_reduce": AllReduce,
}


def parse(found: Mapping[str, Any]) -> Gpu:
    """Return the GPU of a fit (`fit.fit`)."""
    return Gpu(found["gpu"], **{part: kind(**found["terms"][part]) for part, kind in PARTS.items()})


def content(path: Path | None = None) -> dict[str, Any]:
    """Return the content of a fit; None: that of the package. Raises BadInput."""
    if path is None:
        shipped: dict[str, Any] = json.loads((importlib.resources.files(__package__) / SHIPPED).read_text())
        return shipped
    found = _FIT.read(path)
    try:
        checked = msgspec.convert(found, _Fit)
        for name, part in msgspec.structs.asdict(checked.terms).items():
            if wrong := [term for term, value in vars(part).items() if not 0 < value < _MOST]:
                raise ValueError(f"{name}.{wrong[0]} is not above 0, or is too large")
    except ValueError as error:
        _FIT.refuse(path, error)
    return found
