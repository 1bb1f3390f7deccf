"""Settings: the sizes that all ranks of a Buffer must agree on, compared once when it opens."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from moecomm import _native
from moecomm.base.choices import ON_TIMEOUT, WIRES, OnTimeout, Wire
from moecomm.base.placement import NONE, Placement, checked
from moecomm.base.protocol import (
    DTYPES,
    MAX_CHUNK,
    MAX_HOST_RANKS,
    MAX_RANKS,
    MAX_TOPK,
    MOST_HEAP_BYTES,
    hash_words,
    told_bytes,
)
from moecomm.base.validation import check_dtype, is_integer
from moecomm.errors import BadInput, Unsupported

if TYPE_CHECKING:
    from moecomm.ranks.opening import Opening
    from moecomm.ranks.session import Backend

VERSION = 10  # of the protocol in csrc/protocol
MAX_FLAT_ROWS = 1 << 23
_MOST = 1 << 31
_MOST_HEAP = MOST_HEAP_BYTES >> 1  # bytes; extensions come on top
_MAGIC = 0x6D6F65636F6D6D
# Between domains a token holds its place until its row has gone all the way.  With 256 places a dispatch of 4096 tokens
# between two H100s took 606 us and a combine 1279 (bench/results/rings-h100-2.json), with 2496 places 297 and 582
# (domains-h100-2.json at commit c5dad89a).
_TRIPS = 3

_NUMBERS = ("hidden", "num_experts", "topk", "max_tokens", "window_bytes", "domain_ranks", "verify_every")

CAPACITY_FACTOR = 1.5
_HOST_ROUNDS = 16
# Bytes of one round's rows.  So much is never too much: few tokens have room for the worst case whatever is expected.
_ROOM = 512 << 20


def wanted_device(device: Any) -> torch.device | None:
    """Return the device that a caller names; an int is a GPU, None is none.  Raises BadInput."""
    try:
        if isinstance(device, int):
            return torch.device("cuda", device)
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BadInput("device", repr(device), "a device of torch") from error


def check_numbers(given: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise BadInput for the first of these arguments that is no number that ranks could compare."""
    for name in names:
        value = given[name]
        if (type(value) is not int and not is_integer(value)) or not -(1 << 63) <= value < 1 << 63:
            raise BadInput(name, repr(value), "a whole number, of at most 64 bits")


@dataclass(frozen=True)
class Settings:
    """The sizes of a Buffer."""

    ranks: int
    hidden: int
    num_experts: int
    topk: int
    max_tokens: int
    dtype: torch.dtype
    backend: str
    window_bytes: int | None
    domain_ranks: int | None = None  # all
    wire: Wire | None = None  # of combines that name none
    capacity_factor: float | None = None
    verify_every: int = 0
    on_timeout: OnTimeout = "raise"
    placement: Placement | None = None  # with which it opens; `num_experts` are then its slots: see named_experts

    def placed(self, placement: Any) -> Settings:
        """Return the settings with this placement, or None.  Rounds see slots as experts.  Raises BadInput."""
        given = checked(placement)
        if given is None:
            return self
        if given.num_experts != self.num_experts:
            raise BadInput("placement", repr(given), f"one of num_experts = {self.num_experts}")
        return replace(self, num_experts=given.ranks * given.slots, placement=given)

    def agree(self, ranks: Opening) -> str:
        """Compare with the other ranks.  Collective.

        Returns:
            A name of this opening: 16 hexadecimal digits, the same on every rank, and of no other opening.

        Raises:
            Mismatch: on every rank, with the first field in which ranks differ.
            BadInput: at once, for a field that is no number.
        """
        return ranks.compare(self.compared(), secrets.token_bytes(8))[0].hex()

    def compared(self) -> dict[str, str]:
        """Return what ranks compare, as errors show it.  Raises BadInput for what is no number, and checks no more."""
        is_dtype = isinstance(self.dtype, torch.dtype) and self.dtype in DTYPES
        found: dict[str, Any] = {
            "magic": _MAGIC,
            "version": VERSION,
            "hidden": self.hidden,
            "num_experts": self.num_experts,
            "topk": self.topk,
            "max_tokens": self.max_tokens,
            "dtype": self.dtype if is_dtype else "another",
            "window_bytes": -1 if self.window_bytes is None else self.window_bytes,
            "domain_ranks": self.ranks if self.domain_ranks is None else self.domain_ranks,
            "wire": self.wire if self._is_wire else None,
            "capacity_factor": self._factor,
            "verify_every": self.verify_every,
            "on_timeout": self.on_timeout if self.on_timeout in ON_TIMEOUT else "another",
            "placement": "None" if self.placement is None else f"one with the digest {self.placement.digest:#x}",
            "backend": self.backend,
        }
        check_numbers(found, _NUMBERS)
        found.update(zip(_NUMBERS, map(int, map(found.__getitem__, _NUMBERS)), strict=True))
        return dict(zip(found, map(str, found.values()), strict=True))

    def check(self) -> None:
        """Raise BadInput for a value that can't be used.  Called after agree(), so that all ranks raise alike."""
        check_dtype("dtype", self.dtype, DTYPES)
        if not self._is_wire:
            raise BadInput("wire", repr(self.wire), "None, 'exact', 'fp8' or 'int8'")
        if self.on_timeout not in ON_TIMEOUT:
            raise BadInput("on_timeout", repr(self.on_timeout), " or ".join(map(repr, ON_TIMEOUT)))
        if self._factor is not None and math.isnan(self._factor):
            raise BadInput("capacity_factor", repr(self.capacity_factor), "a number greater than 0, or None")
        if self.verify_every < 0:
            raise BadInput("verify_every", self.verify_every, "0 for never, or a number of rounds")
        if self.hidden < 1 or self.hidden * self.dtype.itemsize % 16:
            raise BadInput(
                "hidden", self.hidden, f"rows of a multiple of 16 bytes: a multiple of {16 // self.dtype.itemsize}"
            )
        if not 1 <= self.topk <= MAX_TOPK:
            raise BadInput("topk", self.topk, f"1 to {MAX_TOPK}")
        most = MAX_HOST_RANKS if self.backend == "host" else MAX_RANKS
        if not 1 <= self.ranks <= most:
            raise BadInput("group", f"{self.ranks} ranks", f"1 to {most}, which backend {self.backend!r} connects")
        if self.placement is not None and self.placement.ranks != self.ranks:
            raise BadInput("placement", repr(self.placement), f"one for the group's {self.ranks} ranks")
        if self.balances and self.is_multi_domain:
            raise Unsupported('choice="balanced" of a placement in several domains: see "nearest"')
        if self.num_experts < self.ranks:
            raise BadInput("num_experts", self.num_experts, f"at least {self.ranks}, the number of ranks")
        if self.max_tokens < 1 or self.ranks * self.max_tokens >= MAX_FLAT_ROWS:
            raise BadInput("max_tokens", self.max_tokens, f"1 to {(MAX_FLAT_ROWS - 1) // self.ranks}")
        for name, size in (("hidden", self.staged_row_bytes), ("num_experts", self.num_experts)):
            if size >= _MOST:
                raise BadInput(name, getattr(self, name), "a smaller number: sizes have 32 bits")
        if self.window_bytes is not None and not 1 <= self.window_bytes <= _MOST_HEAP:
            raise BadInput("window_bytes", self.window_bytes, f"1 to {_MOST_HEAP}, or None")
        if self.domain_ranks is not None and (self.domain_ranks < 1 or self.ranks % self.domain_ranks):
            raise BadInput("domain_ranks", self.domain_ranks, f"a divisor of the number of ranks, {self.ranks}")

    def check_memory(self, backend: Backend, shape: _native.Shape, memory_bytes: int) -> None:
        """Raise BadInput, with the size that takes the most, for a window that is larger than all memory there is.

        `shape`: of these settings.
        """
        window = int(_native.window_layout(shape).bytes)
        if window <= memory_bytes:
            return
        least: dict[str, Any] = {"num_experts": self.ranks, "hidden": 16, "max_tokens": 1, "topk": 1}
        least |= {} if self.window_bytes is None else {"window_bytes": 1}
        name = min(least, key=lambda name: replace(self, **{name: least[name]}).total_bytes(backend))
        want = f"sizes whose window fits the {memory_bytes >> 20} MiB of this machine; this takes {window >> 20} MiB"
        raise BadInput(name, getattr(self, name), want)

    def total_bytes(self, backend: Backend) -> int:
        """Bytes of the whole window of a rank, by the rules of a backend."""
        return int(_native.window_layout(self.shape(backend)).bytes)

    @property
    def named_experts(self) -> int:
        """The experts that callers name.  With a placement `num_experts`, its slots, may be more or fewer."""
        return self.num_experts if self.placement is None else self.placement.num_experts

    @cached_property
    def balances(self) -> bool:
        """Return whether each round balances replicas, in a part of the heap (csrc/protocol/placement.h)."""
        return self.placement is not None and self.placement.choice == "balanced"

    @cached_property
    def is_multi_domain(self) -> bool:
        """Return whether there are several domains, in which few tokens travel directly and not in packets."""
        return self.domain_ranks not in (None, self.ranks)

    def packet_bytes(self, backend: Backend) -> int:
        """`Shape.packet_bytes`, by the rules of a backend."""
        room = backend.direct_bytes if self.is_multi_domain else backend.packet_bytes
        return room(self.ranks, self.max_tokens, self.staged_row_bytes)

    def ring_tokens(self, backend: Backend) -> int:
        """`Shape.ring_tokens`, by the rules of a backend, with room for the few tokens that are put directly."""
        ring = backend.ring_tokens(self.ranks, self.max_tokens, self.staged_row_bytes)
        if not self.is_multi_domain:
            return ring
        few = min(self.max_tokens, self.packet_bytes(backend) // self.staged_row_bytes)
        tokens = min(max(_TRIPS * ring, few), self.max_tokens)
        tokens = max(tokens, self.domain_ranks or 0)  # one for each rank whose masked forwarders another stands in for
        return -(-tokens // MAX_CHUNK) * MAX_CHUNK

    def shape(self, backend: Backend) -> _native.Shape:
        """The sizes of a window, by the rules of a backend."""
        shape = _native.Shape(
            ranks=self.ranks,
            slots=self.num_experts,
            named_experts=0 if self.placement is None else self.placement.num_experts,
            topk=self.topk,
            max_tokens=self.max_tokens,
            ring_tokens=self.ring_tokens(backend),
            packet_bytes=self.packet_bytes(backend),
            staged_row_bytes=self.staged_row_bytes,
            heap_bytes=min(self.window_bytes or self.default_heap(), _MOST_HEAP),
            domain_ranks=self.domain_ranks or 0,
        )
        shape.receive_bytes = _native.received_token_bytes(shape, *self.receive_payload_bytes)
        if self.balances:
            shape.heap_bytes += _native.choice_bytes(shape)
        return shape

    @cached_property
    def staged_row_bytes(self) -> int:
        """The widest row that combine stages: a reduced row in float32, gradients of weights, and told hashes."""
        told = told_bytes(self.domain_ranks or 0) if self.verify_every and self.is_multi_domain else 0
        return self.hidden * 4 + told + self.grads_bytes

    @property
    def grads_bytes(self) -> int:
        """Bytes of the gradients of weights behind a row: `CombineConfig::grads_bytes`."""
        return -(-self.topk * 4 // 16) * 16

    @property
    def receive_payload_bytes(self) -> tuple[int, int]:
        """The widest row that travels to another domain, and the room for its scales.

        Scales of narrower rows may use the rest of the row's room, too.
        """
        return self.hidden * self.dtype.itemsize, max(self.hidden // 4, 256)

    def local_experts(self, rank: int = 0) -> int:
        """Return the number of experts of a rank, as experts_of().  Rank 0 has the most."""
        return self._local[rank]

    @cached_property
    def _local(self) -> tuple[int, ...]:
        """local_experts() of each rank."""
        least, longer = divmod(self.num_experts, self.ranks)
        return (least + 1,) * longer + (least,) * (self.ranks - longer)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The number of experts of each rank: those of its slots that are not empty."""
        if self.placement is not None:
            return tuple(sum(expert != NONE for expert in one) for one in self.placement.held)
        return self._local

    @cached_property
    def held_by_all(self) -> int:
        """The number of experts of all ranks, at least 1."""
        return max(1, sum(self.held))

    @cached_property
    def extremes(self) -> tuple[int, int]:
        """The rank with the most experts, and the one with the fewest of those that have any."""
        some = list(filter(None, self.held)) or [self.held[0]]
        return self.held.index(max(some)), self.held.index(min(some))

    def expected_tokens(self, tokens: int) -> int:
        """Return the tokens by which a rank that has so many chooses blocks and schedules.

        Where some ranks have no expert, a rank without tokens expects `max_tokens` of each of them.
        """
        return self.max_tokens if tokens == 0 and 0 in self.held else tokens

    def expected_rows(self, tokens: int) -> int:
        """Return the rows of an expert in a round in which ranks have as many tokens as this one, at least 1.

        Of a rank without tokens: see expected_tokens().
        """
        expected = self.expected_tokens(tokens)
        senders = self.ranks if expected == tokens else self.held.count(0)
        return max(1, expected * self.topk * senders // self.held_by_all)

    def worst_rows(self, layout: str, alignment: int = 1, max_rows: int | None = None, *, rank: int = 0) -> int:
        """The most rows a rank can receive in a dispatch of this layout; `max_rows`: see Buffer.dispatch."""
        return self._worst_rows(layout, alignment, self._local[rank], self.max_tokens, max_rows)

    def _worst_rows(self, layout: str, alignment: int, local: int, max_tokens: int, max_rows: int | None = None) -> int:
        rows = self.ranks * max_tokens
        if layout == "expert":
            rows = rows * self.topk + (alignment - 1) * local
        if max_rows is not None:
            rows = min(max_rows, rows)
        return local * rows if layout == "batched" else rows

    def round_bytes(self, layout: str, max_rows: int | None = None) -> int:
        """Window memory for the outputs of one round in the worst case: rows, and the tables of the handle."""
        row = self.hidden * self.dtype.itemsize + self.hidden // 32 + 64  # with scales, src and weights
        tokens, local = self.ranks * self.max_tokens, self._local[0]
        return self.worst_rows(layout, 128, max_rows) * row + tokens * (16 * self.topk + 16) + 4 * local + (1 << 16)

    def capacity_rows(self, layout: str, alignment: int = 1, *, rank: int = 0) -> int:
        """The rows that a dispatch makes room for if its caller does not say how many.

        They are those of even routing times the capacity factor, with room for padding and for a token of each rank,
        at most those of the worst case.  Without a factor of the caller, as many as fit _ROOM are not too many either.
        Rows go to slots that hold an expert.  A rank that has none makes room for one row, in `batched` for each slot,
        because kernels clamp a wrong row to the last one (row_inside in csrc/dispatch/place.cuh).
        """
        local, held = self._local[rank], self.held[rank]
        groups = local if layout == "batched" else 1
        if held == 0:
            return groups
        even = self.max_tokens * (min(self.topk, sum(map(bool, self.held))) if layout == "flat" else self.topk)
        share = local if layout == "batched" else held  # empty slots are groups of a batched output, as large as others
        even = -(-even * share * self.ranks // self.held_by_all)  # a rank with more experts gets more rows
        factor = CAPACITY_FACTOR if self.capacity_factor is None else self.capacity_factor
        worst = self._worst_rows(layout, alignment, local, self.max_tokens)
        if factor * even >= worst:
            return worst
        rows = max(math.ceil(factor * even), self._worst_rows(layout, alignment, local, 1))
        if layout == "expert" and alignment > 1:
            rows = max(rows, even + (alignment - 1) * local)
        if self.capacity_factor is None:
            rows = max(rows, _ROOM // self._output_row_bytes)
        return min(-(-rows // groups) * groups, worst)

    def default_heap(self) -> int:
        """Window memory for outputs by default: those of a round, and a reserve; on CPUs of up to 16 small rounds.

        A copy out of the window takes a CPU nearly as long as the round itself, and pages of the window that are not
        used take no memory there.
        """
        tables, rows = self._largest_round
        reserve = self._default_reserve
        if self.backend == "host":
            return max(2 * reserve, min(_HOST_ROUNDS * reserve, _ROOM))
        return tables + rows + reserve

    def heap_parts(self, heap_bytes: int) -> tuple[int, int]:
        """Divide a heap: return the bytes for tables, and of the reserve (moecomm/rounds/memory.py).

        The reserve has room for any round that names no `max_rows`, but takes at most half of a heap that is smaller
        than the default.
        """
        tables, rows = self._largest_round
        reserve = self._default_reserve
        if heap_bytes < self.default_heap():
            reserve = min(reserve, heap_bytes // 2)
        return (heap_bytes - reserve) * tables // (tables + rows), reserve

    @cached_property
    def _default_reserve(self) -> int:
        """Bytes of a round of any layout; on GPUs of a fused layer of `max_tokens`, too, which may take more."""
        tables, rows = self._largest_round
        if self.backend == "host":
            return tables + rows
        # A fused layer publishes rows and receives one for each entry, beside row descriptors.
        published = self.max_tokens * (self.topk + 1) * self._output_row_bytes
        descriptors = self.largest_rows * 16
        return max(tables + rows, published + descriptors + tables)

    @cached_property
    def largest_rows(self) -> int:
        """Rows of the layout that takes the most.  The worst case of `batched` counts up to 2 GiB."""
        most = self.extremes[0]
        rows = max(self.capacity_rows("flat", rank=most), self.capacity_rows("expert", 128, rank=most))
        batched = self.capacity_rows("batched", rank=most)
        return max(rows, batched) if batched * self._output_row_bytes <= 2 << 30 else rows

    @cached_property
    def _largest_round(self) -> tuple[int, int]:
        """Bytes of a round's tables, with what verifies it, and of its rows, in the layout that takes the most."""
        rows = self.largest_rows
        arriving = self.hidden * self.dtype.itemsize
        tables = rows * (self._output_row_bytes - arriving) + self.max_tokens * self.tables_bytes
        tables += 16 * self._local[0] + (1 << 16)
        if self.verify_every:  # for each row hashes, and the tables of the round that says what was found
            domains = self.ranks // (self.domain_ranks or self.ranks)
            hashes = 2 if self.backend == "host" else hash_words(self.ranks, domains)
            tables += 8 * hashes * rows + self.max_tokens * self.tables_bytes
        return int(tables), int(rows * arriving)  # of sizes that may be NumPy's

    @property
    def tables_bytes(self) -> int:
        """Bytes of a handle's tables for each of `max_tokens`."""
        tables = self.ranks * (4 * self.topk + 4) + 8 * self.topk + 4 * self.ranks
        if self.domain_ranks is not None and self.is_multi_domain:
            tables += 4 * self.ranks * (2 * self.topk + self.domain_ranks)
        return tables

    @cached_property
    def _output_row_bytes(self) -> int:
        """A row as it arrives, or in FP8 with its scales, and its source, weights and ids."""
        wide = self.hidden * self.dtype.itemsize
        return max(wide, self.hidden + self.hidden // 16) + 12 + 12 * self.topk

    @property
    def _is_wire(self) -> bool:
        """Return whether the wire is None or a word of WIRES.  Arrays compare by element."""
        return self.wire is None or (isinstance(self.wire, str) and self.wire in WIRES)

    @property
    def _factor(self) -> float | None:
        """The capacity factor; nan for what is no number greater than 0."""
        factor: Any = self.capacity_factor  # not checked yet
        if factor is None:
            return None
        if isinstance(factor, bool) or not isinstance(factor, Real) or not float(factor) > 0:
            return math.nan
        return float(factor)
