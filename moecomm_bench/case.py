"""Sizes, routing, and the bytes that must move in a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from moecomm.backends import emulated_nic
from moecomm.base import formats
from moecomm.base.choices import BackendName
from moecomm.base.experts import owners_of
from moecomm.base.protocol import LAYOUTS
from moecomm.errors import BadInput
from moecomm.gpu import quantize_rows
from moecomm.ranks.rendezvous import rendezvous
from moecomm.ranks.settings import Settings
from moecomm.router import MODELS, random_routing
from moecomm_bench import replay

QUANT_GROUP = 128
GIVEN = "-given"  # ends the name of a payload that is cast before
FORMATS = quantize_rows.NAMES
# The cast is part of dispatch, but for GIVEN.
PAYLOADS = (
    *("bf16", "fp8", "fp8-column", "fp8-ue8m0", "fp8-ue8m0-column", f"fp8{GIVEN}"),
    *FORMATS,
    *(name + GIVEN for name in FORMATS),
)
MODES = ("graph", "eager")
OTHERS = ("deep_ep", "nccl_ep", "flashinfer")


@dataclass(frozen=True)
class RoundsCase:
    """One run of dispatch-combine. Every combination of the listed values is measured."""

    model: str  # a name of moecomm.router.MODELS, or "" if numbers were given
    hidden: int
    topk: int
    experts: int
    ranks: int
    backend: BackendName
    tokens: list[int]  # of each rank
    layouts: list[str]
    payloads: list[str]  # of dispatch: names of PAYLOADS
    sms: list[int]  # 0: from the table of moecomm.gpu.tuning
    mode: str  # graph or eager
    cold: bool = False  # caches flushed before each operation; else chained
    skew: float = 0.0  # fraction of the tokens that want experts of rank 0 only
    chain: int = 0  # operations timed together; 0: chosen by size
    replays: int = 30
    pairs: bool = True
    ceiling: bool = True
    peers: bool = True
    overlap_gemm: bool = False
    fp8_wire: bool = False
    int8_wire: bool = False
    rows_wire: bool = False  # not of flat rows
    domain_ranks: int = 0  # of Buffer; 0: all ranks that load and store reach
    nic: str = ""  # MOECOMM_NIC; empty: none is emulated
    seed: int = 0
    routing_file: str = ""  # of moecomm.routing, to be replayed; empty: the routing is drawn
    inputs: int = 4  # tokens with a routing of their own, which operations rotate among
    others: list[str] = field(default_factory=list)  # of OTHERS: libraries to measure, or to name as absent
    singles: int = 0  # single calls, and calls one by one beside those in a graph; 0: neither

    def check(self) -> None:
        """Raise BadInput for a value that cannot be measured."""
        if self.ranks < 1 or self.experts % self.ranks:
            raise BadInput("ranks", self.ranks, f"a divisor of {self.experts} experts")
        if not self.tokens or min(self.tokens) < 1:
            raise BadInput("tokens", self.tokens, "at least 1 each")
        if self.rows_wire and self.domain_ranks not in (0, self.ranks):
            raise BadInput("rows_wire", True, "False between domains, where sums travel")
        if self.domain_ranks < 0 or (self.domain_ranks and self.ranks % self.domain_ranks):
            raise BadInput("domain_ranks", self.domain_ranks, f"a divisor of {self.ranks} ranks, or 0 for all")
        if self.nic:
            emulated_nic.parse("nic", self.nic)
        if self.nic and (self.backend != "lsa" or self.domain_ranks in (0, self.ranks)):
            raise BadInput("nic", self.nic, "no emulated NIC but between several domains of lsa")
        sizes = Settings(self.ranks, self.hidden, self.experts, self.topk, max(self.tokens), torch.bfloat16, "", None)
        sizes.check()
        if any(name not in OTHERS for name in self.others):
            raise BadInput("others", ",".join(self.others), f"some of {', '.join(OTHERS)}")
        for name, values, known in (("layout", self.layouts, LAYOUTS), ("payload", self.payloads, PAYLOADS)):
            if not values or any(value not in known for value in values):
                raise BadInput(name, ",".join(values), f"some of {', '.join(known)}")
        if not self.sms or min(self.sms) < 0:
            raise BadInput("sms", self.sms, "at least 1 each, or 0 for the table")
        if self.mode not in MODES or (self.mode == "graph" and self.backend == "host"):
            raise BadInput("mode", self.mode, "eager on CPUs; graph or eager on GPUs")
        if not 0 <= self.skew <= 1 or self.chain < 0 or self.replays < 1:
            raise BadInput(
                "skew, chain, replays", (self.skew, self.chain, self.replays), "a part; 0 or more; 1 or more"
            )
        if self.inputs < 1 or self.singles < 0:
            raise BadInput("inputs, singles", (self.inputs, self.singles), "1 or more; 0 or more")
        if self.routing_file and self.skew:
            raise BadInput("skew", self.skew, "no skew beside a routing that is replayed")
        if self.routing_file:
            replay.check(self.routing_file, self.experts, self.topk, self.model)

    def chain_of(self, tokens: int) -> int:
        """Return how many operations are timed together: fewer of the larger ones, one on CPUs."""
        if self.chain:
            return self.chain
        return 1 if self.backend == "host" else max(4, min(100, 65536 // tokens))

    def routing(self, tokens: int, rank: int, index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expert ids [T, K] and weights [T, K] of a rank's tokens, on the CPU; equal in every run.

        `index` is the number of the input. Inputs of a replayed routing are the next tokens of the file.
        """
        if self.routing_file:
            return replay.rows(self.routing_file, tokens, index * self.ranks + rank)
        generator = torch.Generator().manual_seed(((self.seed + index) * 1000 + rank) * 1_000_003 + tokens)
        anywhere, weights = random_routing(tokens, self.experts, self.topk, generator=generator)
        if self.skew == 0:
            return anywhere, weights
        there, _ = random_routing(tokens, self.experts, self.topk, ranks=self.ranks, skew=1.0, generator=generator)
        # It chose a rank, that of every token's first expert; renumber that rank to 0, on all ranks alike.
        local = self.experts // self.ranks
        there = (there - there[0, 0] // local * local) % self.experts
        wants = torch.rand(tokens, 1, generator=generator) < self.skew
        return torch.where(wants, there, anywhere), weights

    def row_bytes(self, payload: str) -> int:
        """Return the bytes of a dispatched row on the wire.

        A column has 2 bytes, or 1 in fp8; each 128 columns of fp8 have a scale of 4 bytes, or 1 in ue8m0. Scales that
        arrive by column travel in 4-byte words.
        """
        if payload == "bf16":
            return 2 * self.hidden
        if (name := payload.removesuffix(GIVEN)) in FORMATS:
            made = formats.FORMATS[name]
            size = 0 if made.scales is None else made.scales.itemsize
            return made.value_columns(self.hidden) * made.values.itemsize + made.scale_columns(self.hidden) * size
        scales = -(-self.hidden // QUANT_GROUP)
        if "ue8m0" not in payload:
            return self.hidden + 4 * scales
        return self.hidden + (-(-scales // 4) * 4 if payload.endswith("-column") else scales)

    def wire_bytes(self, part: str, payload: str) -> int:
        """Return the bytes of a row that has to leave a rank: columns and scales of dispatch, a bf16 row of combine.

        In every row of a result one such row counts for each (token, other rank), whatever a library sends: metadata,
        padding, a row for each expert, and sums in float32 are its own.
        """
        return self.row_bytes(payload) if part == "dispatch" else 2 * self.hidden

    def beside_bytes(self, layout: str) -> int:
        """Return the bytes of metadata on the wire next to a dispatched row, which Routed hands out with the row.

        flat: 8 bytes of id and 4 of weight for each of the K experts, and 8 bytes of source. The other layouts have 12
        bytes per expert, under 1 % of a row, which are not counted.
        """
        return 12 * self.topk + 8 if layout == "flat" else 0


def model_sizes(model: str, hidden: int | None, topk: int | None, experts: int | None) -> tuple[str, int, int, int]:
    """Return (name, hidden, topk, experts) of a model, with given numbers in place of its own.

    The name is "" if a given number differs from the model's. Raises BadInput for an unknown model.
    """
    if model not in MODELS:
        raise BadInput("model", repr(model), f"one of {', '.join(MODELS)}")
    shape = MODELS[model]
    own = (shape.hidden, shape.topk, shape.num_experts)
    sizes = tuple(own[i] if given is None else given for i, given in enumerate((hidden, topk, experts)))
    return model if sizes == own else "", sizes[0], sizes[1], sizes[2]


@dataclass(frozen=True)
class Traffic:
    """Rows from each rank (first index) to each rank (second index): [R, R], int64, or float64 as a mean.

    Attributes:
        rows: one row for each (token, rank), as on the wire.
        entries: one row for each (token, expert).
        singles: those of `rows` of which the rank has one expert.
        relayed: one row for each (token, domain), to the forwarder in another domain.
        domain_ranks: consecutive ranks that form a domain.
    """

    rows: torch.Tensor
    entries: torch.Tensor
    singles: torch.Tensor
    relayed: torch.Tensor
    domain_ranks: int

    @staticmethod
    def mean(inputs: Sequence[Traffic]) -> Traffic:
        """Return the mean over inputs, of rows in float64; of a single input, its own."""
        first = inputs[0]
        if len(inputs) == 1:
            return first
        names = ("rows", "entries", "singles", "relayed")
        means = [torch.stack([getattr(found, name) for found in inputs]).double().mean(dim=0) for name in names]
        return Traffic(means[0], means[1], means[2], means[3], first.domain_ranks)

    @staticmethod
    def of(group: dist.ProcessGroup, topk_idx: torch.Tensor, experts: int, domain_ranks: int = 0) -> Traffic:
        """Count the rows of all ranks. Collective. A `domain_ranks` of 0 means one domain."""
        ranks = rendezvous(group)
        near = domain_ranks or ranks.ranks
        owner = owners_of(topk_idx, experts, ranks.ranks)
        to = torch.arange(ranks.ranks)
        wanted = owner.unsqueeze(2) == to  # [T, K, R]
        by_rank = wanted.any(dim=1)  # [T, R]
        by_domain = by_rank.view(len(by_rank), -1, near).any(dim=2).sum(dim=0)  # [D]
        passes_on = (to % near == ranks.rank % near) & (to // near != ranks.rank // near)
        relayed = torch.where(passes_on, by_domain[to // near], 0)
        singles = (wanted.sum(dim=1) == 1).sum(dim=0)
        mine = torch.stack([by_rank.sum(dim=0), wanted.sum(dim=(0, 1)), singles, relayed])  # [4, R]
        everybody = [
            torch.frombuffer(bytearray(data), dtype=torch.int64).view(4, ranks.ranks)
            for data in ranks.all_gather(mine.contiguous().numpy().tobytes())
        ]
        by_rank, entries, singles, relayed = torch.stack(everybody, dim=1)
        return Traffic(by_rank, entries, singles, relayed, near)

    def single_share(self) -> float:
        """Return the share of rows between ranks of which the rank has one expert."""
        remote = self.rows.sum() - self.rows.diagonal().sum()
        return float((self.singles.sum() - self.singles.diagonal().sum()) / remote.clamp(min=1))

    def crossing(self, *, direct: bool) -> tuple[float, float]:
        """Return the mean number of rows that leave a rank, as (inside its domain, to other domains).

        With `direct`, one row for each (token, rank) goes to other domains. Otherwise one row for each (token, domain)
        goes to a forwarder, which sends rows to the other ranks of its domain; these count as rows inside a domain.
        """
        ranks = len(self.rows)
        domain = torch.arange(ranks) // self.domain_ranks
        near = domain.unsqueeze(1) == domain
        inside = float((self.rows * near).sum() - self.rows.diagonal().sum())
        far = self.rows * ~near
        if direct:
            return inside / ranks, float(far.sum()) / ranks
        passed_on = float(torch.where(self.relayed > 0, 0, far).sum())
        return (inside + passed_on) / ranks, float(self.relayed.sum()) / ranks

    def wire(self, *, by_expert: bool = False) -> float:
        """Return the mean number of rows that leave a rank: one for each (token, rank), or for each (token, expert)."""
        sent = self.entries if by_expert else self.rows
        return float(sent.sum() - sent.diagonal().sum()) / len(sent)

    def busiest(self) -> float:
        """Return the rows over the busiest link: out of, or into, one rank."""
        remote = self.rows - self.rows.diagonal().diag()
        return float(max(remote.sum(dim=0).max(), remote.sum(dim=1).max()))

    def logical(self, layout: str) -> float:
        """Return the mean number of rows that a rank receives in `layout`, its own included."""
        return float((self.rows if layout == "flat" else self.entries).sum()) / len(self.rows)
