"""Limits of kernels that a Buffer checks when it opens."""

from __future__ import annotations

import dataclasses

from moecomm import _native
from moecomm.base.protocol import TYPE_BYTES, TYPES
from moecomm.errors import BadInput
from moecomm.gpu import linking
from moecomm.gpu.blocks import SHARED_LIMIT, choice_shared_bytes
from moecomm.gpu.jit import KernelSpec, block_fields, packets_of
from moecomm.ranks.settings import Settings

MAX_DOMAIN_RANKS = 32  # of several domains: a lane of a warp for each; csrc/transport/forwarders.cuh asserts it


def check(settings: Settings) -> None:
    """Raise BadInput for sizes with which a dispatch kernel can't be compiled."""
    domain = settings.domain_ranks if settings.is_multi_domain else None
    if domain is not None and domain > MAX_DOMAIN_RANKS:
        raise BadInput("domain_ranks", domain, f"at most {MAX_DOMAIN_RANKS} where there are several domains")
    sizes = (settings.ranks, settings.topk, settings.hidden, TYPES[settings.dtype], domain or 0)
    placement = settings.placement
    if placement is not None:
        most = most_experts(*sizes, named_experts=placement.num_experts, balanced=settings.balances)
        if settings.num_experts > most:
            want = (
                f"at most {most} slots of {placement.num_experts} experts: their counters and table take shared memory"
            )
            raise BadInput("placement", repr(placement), want)
        return
    most = most_experts(*sizes)
    if settings.num_experts > most:
        want = f"at most {most} of {settings.ranks} ranks, topk={settings.topk}: their counters take shared memory"
        raise BadInput("num_experts", settings.num_experts, want)


def most_experts(
    ranks: int,
    topk: int,
    hidden: int,
    kind: int,
    domain_ranks: int = 0,
    *,
    named_experts: int = 0,
    balanced: bool = False,
) -> int:
    """Return the most experts, or slots, for which every dispatch kernel has room for its counters in shared memory.

    The kernels that need the most are those that replicate rows: with packets, or, with several domains, the second
    half of a split dispatch.  `kind`: the Type of the rows; `domain_ranks`: of several domains, else 0.
    `named_experts`, `balanced`: of a placement, whose table takes shared memory as well.
    """
    fits, beyond = 0, 1 << 16  # experts of a rank
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        slots = middle * ranks
        specs = _largest(ranks, slots, topk, hidden, kind, domain_ranks)
        if named_experts:
            looked_up = 0 if balanced else named_experts
            specs = [dataclasses.replace(s, placed=True, balanced=balanced, named_experts=looked_up) for s in specs]
        chooser = choice_shared_bytes(ranks, slots, named_experts, replicates=True) if balanced else 0
        if chooser <= SHARED_LIMIT and all(map(_fits, specs)):
            fits = middle
        else:
            beyond = middle
    return fits * ranks


def _largest(ranks: int, experts: int, topk: int, hidden: int, kind: int, domain_ranks: int) -> list[KernelSpec]:
    row = hidden * TYPE_BYTES[kind]
    plain = KernelSpec(
        op="dispatch",
        ranks=ranks,
        experts=experts,
        topk=topk,
        hidden=hidden,
        layout=_native.Layout.expert,
        type=kind,
        row_bytes=row,
        transport=next(name for name in linking.TRANSPORTS if name != "lsa") if domain_ranks else "lsa",
        domain_ranks=domain_ranks,
    )
    specs = [plain]
    if hidden % 16 == 0:
        scales = -(-hidden // 128) * 4
        specs.append(dataclasses.replace(plain, quantize=True, row_bytes=hidden, scale_bytes=scales))
    if domain_ranks:
        specs += [dataclasses.replace(spec, part=int(_native.Part.end)) for spec in specs]
    return specs + [dataclasses.replace(spec, packets=True) for spec in specs if packets_of(spec) is not None]


def _fits(spec: KernelSpec) -> bool:
    try:
        block_fields(spec)
    except ValueError:
        return False
    return True
