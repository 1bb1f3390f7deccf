"""Sizes of a recommendation model, and the work that they make."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from moecomm.errors import BadInput

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SOURCE = (
    "facebookresearch/dlrm, pull request 127, README of the distributed version: columns 128, lookups 100, the layers, "
    "and a projection of 30; its 64 tables and 2048 samples would leave GPUs idle, so tables are 128, and samples 1024 "
    "a rank: as many bags a GPU as measured"
)


@dataclass(frozen=True)
class Lookups:
    """Lookups of one rank: `tables` tables for a `batch` of all ranks, in bags of `pooling` rows of `columns`."""

    tables: int
    batch: int
    pooling: int
    columns: int
    item_bytes: int

    @property
    def bags(self) -> int:
        """Bags of the rank."""
        return self.tables * self.batch

    @property
    def count(self) -> int:
        """Rows that are looked up."""
        return self.bags * self.pooling

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, and of a bag's sum."""
        return self.columns * self.item_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of the rows and of their 64-bit indices."""
        return self.count * (self.row_bytes + 8)

    @property
    def out_bytes(self) -> int:
        """Bytes of all sums."""
        return self.bags * self.row_bytes


@dataclass(frozen=True)
class Product:
    """`experts` products of [rows, depth] and [depth, columns] matrices in 16 bits."""

    rows: int
    columns: int
    depth: int
    experts: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return 2 * self.experts * self.rows * self.columns * self.depth

    @property
    def out_bytes(self) -> int:
        """Bytes of the results."""
        return 2 * self.experts * self.rows * self.columns

    @property
    def bytes(self) -> int:
        """Bytes read and written once."""
        return 2 * self.experts * (self.rows * self.columns + self.columns * self.depth + self.rows * self.depth)


@dataclass(frozen=True)
class Dlrm:
    """A recommendation model. SOURCE names the origin of the defaults.

    Attributes:
        tables: embedding tables of all ranks; the busiest rank has the next whole number of tables / ranks.
        columns: of tables, and of the bottom MLP's result.
        pooling: rows of a bag.
        samples: of a rank.
        bottom: widths of the bottom MLP, its input first and `columns` last.
        top: widths of the top MLP, without its input.
        projection: features that all features are multiplied with; 0: with each other.
        dtype: of tables, of what travels and of gradients: fp32 or bf16. Products are in 16 bits.
    """

    tables: int = 128
    columns: int = 128
    pooling: int = 100
    samples: int = 1024
    bottom: tuple[int, ...] = (2000, 1024, 1024, 128)
    top: tuple[int, ...] = (4096, 4096, 4096, 1)
    projection: int = 30
    dtype: str = "fp32"

    def check(self) -> None:
        """Raise BadInput if a size is out of range."""
        sizes = (self.tables, self.columns, self.pooling, self.samples, *self.bottom, *self.top)
        if min(sizes) < 1 or self.projection < 0:
            raise BadInput("tables, columns, pooling, samples, bottom, top, projection", sizes, "1 or more; 0 or more")
        if len(self.bottom) < 2 or self.bottom[-1] != self.columns:
            raise BadInput("bottom", self.bottom, f"two widths or more, the last one {self.columns}, as tables have")
        if not self.top:
            raise BadInput("top", self.top, "one width or more")
        if self.dtype not in ("fp32", "bf16"):
            raise BadInput("dtype", repr(self.dtype), "fp32 or bf16")

    @property
    def features(self) -> int:
        """Sums of bags, and the bottom MLP's result, of a sample."""
        return self.tables + 1

    @property
    def interactions(self) -> int:
        """Dot products of a sample."""
        return self.features * self.projection or self.features * (self.features - 1) // 2

    @property
    def item_bytes(self) -> int:
        """Bytes of a number of `dtype`."""
        return ITEM_BYTES[self.dtype]

    def lookups(self, ranks: int) -> Lookups:
        """Return the lookups of the busiest of `ranks` ranks."""
        return Lookups(ceil(self.tables / ranks), self.samples * ranks, self.pooling, self.columns, self.item_bytes)

    def layers(self, which: str) -> list[Product]:
        """Return the forward products of the "bottom" or "top" MLP for the samples of a rank."""
        widths = self.bottom if which == "bottom" else (self.columns + self.interactions, *self.top)
        return [Product(self.samples, n, k) for k, n in pairwise(widths)]

    def parameters(self, which: str) -> int:
        """Return the number of weights of an MLP."""
        return sum(layer.columns * layer.depth for layer in self.layers(which))
