"""The kernel of a round, found by the arguments that it is compiled for.  Plans ask once for each kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moecomm import _native
from moecomm.base.protocol import BALANCED, CAST_TYPES, REPLICATED, reads_in_place
from moecomm.gpu import blocks
from moecomm.gpu.blocks import CHOOSE_WARPS
from moecomm.gpu.plain_kernel import PlainKernel
from moecomm.rounds.signature import QUANTIZED

if TYPE_CHECKING:
    from moecomm.gpu import jit

_FLAT, _EXPERT, _FP32 = 0, 1, 2


class Kernels:
    """The kernels of one GPU, compiled or read from the cache when first used (see jit.load)."""

    def __init__(self, device: torch.device, transport: str = "lsa") -> None:
        self._device, self._transport = device, transport
        self._asked: set[_Asked] = set()

    def dispatch(self, args: _native.DispatchArgs) -> jit.Kernel:
        """Return the dispatch kernel for these arguments."""
        return self._load(_Asked(dispatch_spec(args), args.num_tokens, _FP32, may_be_few=True))

    def combine(self, args: _native.CombineArgs) -> jit.Kernel:
        """Return the combine kernel for these arguments."""
        may_be_few = args.weight_grads == 0 and args.staged_hashes == 0 and args.unsummed == 0
        return self._load(_Asked(combine_spec(args), args.num_tokens, args.wire, may_be_few))

    def compile_for(self, shape: _native.Shape) -> int:
        """Compile the kernels that were asked for, as ranks of another shape will ask for them; return their number."""
        from moecomm.gpu import jit, loader

        arch = loader.architecture(torch.cuda.get_device_capability(self._device))
        asked = [one for one in self._asked if not (one.spec.unsummed and is_multi_domain(shape))]  # which are refused
        specs = {self._here(one.in_shape(shape)) for one in asked}
        for spec in specs:
            jit.compile(spec, arch)
        return len(specs)

    def _load(self, asked: _Asked) -> jit.Kernel:
        from moecomm.gpu import jit  # looked up when a kernel is wanted: it brings cuda.core

        self._asked.add(asked)
        return jit.load(self._here(asked.spec), self._device)

    def _here(self, spec: jit.KernelSpec) -> jit.KernelSpec:
        from moecomm.gpu import span_ring

        if spec.transport != "lsa" and self._transport != "lsa":
            spec = replace(spec, transport=self._transport)
        return replace(spec, traced=True) if span_ring.wanted else spec


class _Asked(NamedTuple):
    """Attributes:
    spec: of a kernel.
    num_tokens, wire: of the call that it was wanted for.
    may_be_few: the rows travel in packets where there is room for them.
    """

    spec: jit.KernelSpec
    num_tokens: int
    wire: int
    may_be_few: bool

    def in_shape(self, shape: _native.Shape) -> jit.KernelSpec:
        """Return the spec of the kernel for the same call of a rank in another shape."""
        sizes: dict[str, Any] = {
            "experts": shape.slots,
            "named_experts": shape.named_experts * (self.spec.named_experts > 0),
        }
        made = replace(self.spec, ranks=shape.ranks, **sizes, packets=False, **_domains(shape))
        if made.op == "combine":
            made = replace(made, wire=_wire(made.layout, self.wire, shape))
        return replace(made, packets=self.may_be_few and _fit_packets(made, self.num_tokens, shape))


def dispatch_spec(args: _native.DispatchArgs) -> jit.KernelSpec:
    """Return the configuration of the dispatch kernel for these arguments."""
    from moecomm.gpu import jit

    shape = args.ctx.shape
    placed, balanced = bool(args.ctx.placed) and not args.repeat, args.ctx.placed >= BALANCED and not args.repeat
    spec = jit.KernelSpec(
        op="dispatch",
        ranks=shape.ranks,
        experts=shape.slots,
        topk=shape.topk,
        hidden=args.hidden,
        layout=args.layout,
        type=args.in_type,
        idx_bytes=args.idx_bytes or 8,  # a repeat reads no ids
        row_bytes=args.row_bytes,
        scale_bytes=args.scale_bytes,
        scale_columns=args.scale_columns != 0,
        quantize=bool(args.quantize),
        scale_format=args.scale_format,
        format=QUANTIZED[args.quantize] or "fp8",
        repeat=bool(args.repeat),
        descriptors=bool(args.descriptors),
        placed=placed,
        named_experts=shape.named_experts if placed and not balanced else 0,
        balanced=balanced,
        compares=args.compared != 0,
        part=args.part,
        **_domains(shape),
    )
    return replace(spec, packets=_fit_packets(spec, args.num_tokens, shape))


def combine_spec(args: _native.CombineArgs) -> jit.KernelSpec:
    """Return the configuration of the combine kernel for these arguments.

    Expert and batched rows are added up alike.  Flat rows have no weights and, unless they are cast, travel unchanged
    inside a domain.
    """
    from moecomm.gpu import jit

    shape, flat = args.ctx.shape, args.layout == _FLAT
    spec = jit.KernelSpec(
        op="combine",
        ranks=shape.ranks,
        experts=shape.slots,
        topk=shape.topk,
        hidden=args.hidden,
        layout=_FLAT if flat else _EXPERT,
        type=args.type,
        wire=_wire(args.layout, args.wire, shape),
        weighted=flat or bool(args.weighted),
        own_weights=args.topk_weights != 0,
        in_place=reads_in_place(args),
        unsummed=args.unsummed != 0,
        sum_grads=args.weight_grads != 0 and args.sum_grads != 0,
        verifies=args.staged_hashes != 0,
        wide_bias=args.bias_type != args.type,
        bias_first=args.bias_first != 0,
        **_domains(shape),
    )
    may_be_few = args.weight_grads == 0 and not (spec.verifies or spec.unsummed)
    return replace(spec, packets=may_be_few and _fit_packets(spec, args.num_tokens, shape))


@dataclass(frozen=True)
class Choice(PlainKernel):
    """The kernel that chooses the slots of a dispatch: csrc/dispatch/choose.cuh."""

    shared: int = 0

    @property
    def shared_bytes(self) -> int:
        return self.shared


def choice_of(args: _native.DispatchArgs) -> Choice | None:
    """Return the kernel that chooses the slots of a dispatch with these arguments; None: no kernel does."""
    shape = args.ctx.shape
    if args.ctx.placed < BALANCED or args.repeat or args.part == _native.Part.end:
        return None
    replicates, counts = args.ctx.placed == REPLICATED, (shape.ranks, shape.slots, shape.named_experts)
    shared = blocks.choice_shared_bytes(*counts, replicates=replicates)
    sizes = ", ".join(map(str, (*counts, shape.topk, args.idx_bytes, shared))) + ", true" * replicates
    return Choice("dispatch/choose", f"choose_replicas<{sizes}>", "DispatchArgs", 32 * CHOOSE_WARPS, shared=shared)


def is_multi_domain(shape: _native.Shape) -> bool:
    """Return whether there are several domains."""
    return shape.domain_ranks not in (0, shape.ranks)


def _domains(shape: _native.Shape) -> dict[str, Any]:
    """Return the fields that say how kernels reach other domains, if there are several."""
    several = is_multi_domain(shape)
    return {"transport": "puts" if several else "lsa", "domain_ranks": shape.domain_ranks if several else 0}


def _wire(layout: int, wire: int, shape: _native.Shape) -> int:
    """Return the wire of a combine kernel: flat rows that are not cast travel unchanged inside a domain."""
    return _FP32 if layout == _FLAT and wire not in CAST_TYPES and not is_multi_domain(shape) else wire


def _fit_packets(spec: jit.KernelSpec, num_tokens: int, shape: _native.Shape) -> bool:
    """Return whether rows of so many tokens of this rank travel, or return, in packets.

    The ranks that send rows back decide by the same rule, CombineCall::in_packets in csrc/combine/call.cuh.
    """
    from moecomm.gpu import jit

    packet = jit.packets_of(spec)
    return packet is not None and packet.carry(num_tokens, shape.topk, shape.packet_bytes)


def scaleout_blocks(op: str, blocks: int, num_tokens: int, ring_tokens: int) -> int:
    """Return the blocks of a launch with several domains, where the table of one domain says `blocks`.

    At least 64, where the table may say 24: a combine of rows in the window takes 279 us, and 366 by 32 blocks
    (bench/results/domains-h100-2.json).  Of tokens that take the places of rings in turns, a block with few places
    waits for credits: with 768 places, 32 blocks dispatch in 592 us, 64 in 677, and 64 blocks combine in 807 us, 128 in
    847 (domains-h200-4.json at commit 273846ca).
    """
    blocks = max(blocks, 64)
    if num_tokens <= ring_tokens:
        return blocks
    least, places = (32, 24) if op == "dispatch" else (64, 12)
    return max(least, min(blocks, ring_tokens // places))


@lru_cache(maxsize=64)
def cluster(blocks: int, sms: int) -> int:
    """Return the number of blocks of a cluster of a launch.

    A GEMM that runs concurrently with a round on few multiprocessors may need clusters of them, so the round occupies
    complete ones.  The round gets faster by it, too: on 16 blocks a bf16 dispatch of 4096 tokens takes 481 us, and took
    496 without clusters (bench/results/ht-h200-4.json, and before).
    """
    few = 2 * blocks <= sms  # more do not fit in clusters whatever the GPU's
    return next(size for size in (4, 2, 1) if blocks % size == 0) if few else 1
