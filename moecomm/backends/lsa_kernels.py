"""The kernel of a round, found by the arguments that it is compiled for.  Plans ask once for each kind."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from moecomm import _native
from moecomm.core import packets

if TYPE_CHECKING:
    from moecomm import jit

_FLAT, _EXPERT, _FP32 = 0, 1, 2
_BYTES = (2, 2, 4)  # of a Type of csrc/protocol/args.h that is combined


class Kernels:
    """The kernels of one GPU, compiled or read from the cache when first used (see jit.load)."""

    def __init__(self, device: torch.device, transport: str = "lsa") -> None:
        self._device, self._transport = device, transport

    def dispatch(self, args: _native.DispatchArgs) -> jit.Kernel:
        """Return the dispatch kernel for these arguments."""
        return self._load(dispatch_spec(args))

    def combine(self, args: _native.CombineArgs) -> jit.Kernel:
        """Return the combine kernel for these arguments."""
        return self._load(combine_spec(args))

    def _load(self, spec: jit.KernelSpec) -> jit.Kernel:
        from moecomm import jit  # looked up when a kernel is wanted: it brings cuda.core
        from moecomm.jit import span_ring

        if spec.transport != "lsa" and self._transport != "lsa":
            spec = replace(spec, transport=self._transport)
        return jit.load(replace(spec, traced=True) if span_ring.wanted else spec, self._device)


def dispatch_spec(args: _native.DispatchArgs) -> jit.KernelSpec:
    """Return the configuration of the dispatch kernel for these arguments."""
    from moecomm import jit

    shape = args.ctx.shape
    spec = jit.KernelSpec(
        op="dispatch",
        ranks=shape.ranks,
        experts=shape.experts,
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
        repeat=bool(args.repeat),
        descriptors=bool(args.descriptors),
        part=args.part,
        **_domains(shape),
    )
    packet = jit.packets_of(spec)
    few = packet is not None and packet.carry(args.num_tokens, shape.topk, shape.packet_bytes)
    return replace(spec, packets=few)


def combine_spec(args: _native.CombineArgs) -> jit.KernelSpec:
    """Return the configuration of the combine kernel for these arguments.

    Expert and batched rows are added up alike.  Flat rows have no weights and travel unchanged inside a domain.
    """
    from moecomm import jit

    shape, flat = args.ctx.shape, args.layout == _FLAT
    return jit.KernelSpec(
        op="combine",
        ranks=shape.ranks,
        experts=shape.experts,
        topk=shape.topk,
        hidden=args.hidden,
        layout=_FLAT if flat else _EXPERT,
        type=args.type,
        wire=_FP32 if flat and not is_multi_domain(shape) else args.wire,
        weighted=flat or bool(args.weighted),
        own_weights=args.topk_weights != 0,
        in_place=reads_in_place(args),
        sum_grads=args.weight_grads != 0 and args.sum_grads != 0,
        wide_bias=args.bias_type != args.type,
        packets=comes_in_packets(args),
        **_domains(shape),
    )


def is_multi_domain(shape: _native.Shape) -> bool:
    """Return whether there are several domains."""
    return shape.domain_ranks not in (0, shape.ranks)


def _domains(shape: _native.Shape) -> dict[str, Any]:
    """Return the fields that say how kernels reach other domains, if there are several."""
    return {"transport": "puts", "domain_ranks": shape.domain_ranks} if is_multi_domain(shape) else {}


def comes_in_packets(args: _native.CombineArgs) -> bool:
    """Return whether the rows of this rank's tokens return in packets: rows of few tokens, without gradients.

    The ranks that send them decide by the same rule, CombineCall::in_packets in csrc/combine/call.cuh.
    """
    shape, staged = args.ctx.shape, args.type if args.layout == _FLAT else args.wire
    bytes_of_row = args.hidden * _BYTES[staged]
    room = 0 if is_multi_domain(shape) else shape.packet_bytes
    return args.weight_grads == 0 and packets.fit_return_packets(bytes_of_row, args.num_tokens, shape.topk, room)


def reads_in_place(args: _native.CombineArgs) -> bool:
    """Return whether peers with many tokens read y in place: flat rows in this rank's window, without gradients.

    Rows of other layouts are added up first: over NVLink a row a (token, expert) is more bytes than a sum.
    """
    return args.layout == _FLAT and args.weight_grads == 0 and args.ctx.in_heap(args.y)


@lru_cache(maxsize=64)
def cluster(blocks: int, sms: int) -> int:
    """Return the number of blocks of a cluster of a launch.

    A GEMM that runs concurrently with a round on few multiprocessors may need clusters of them, so the round occupies
    complete ones.  The round gets faster by it, too: on 16 blocks a bf16 dispatch of 4096 tokens takes 480 us, and took
    496 without clusters (bench/results/ht-h200-4.json, and before).
    """
    few = 2 * blocks <= sms  # more do not fit in clusters whatever the GPU's
    return next(size for size in (4, 2, 1) if blocks % size == 0) if few else 1
