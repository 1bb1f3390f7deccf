"""One training iteration as a chain of operators on two streams: the GPU's, and the network's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moecomm_bench.simulate.dlrm.cluster import Cluster
from moecomm_bench.simulate.dlrm.shape import Dlrm, Lookups, Product

UNFUSED, FUSED, TORCH, BOTH = "unfused", "fused", "torch", "fused both ways"
FORMS = (TORCH, UNFUSED, FUSED, BOTH)
GPU, NETWORK = "GPU", "network"
_DENSE_BYTES = 12  # a weight is read and written, and its gradient read, in fp32


@dataclass(frozen=True)
class IterationPhase:
    """An operator: its microseconds on each stream that it occupies, and the phases that it waits for."""

    name: str
    on: dict[str, float]
    after: tuple[str, ...] = ()

    @property
    def us(self) -> float:
        """Microseconds of the operator."""
        return max(self.on.values())


@dataclass(frozen=True)
class Timeline:
    """Phases with the microsecond at which each starts."""

    phases: tuple[IterationPhase, ...]
    starts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, phases: Iterable[IterationPhase]) -> Timeline:
        """Start each phase when its streams are free and what it waits for is done, in the order given."""
        phases = tuple(phases)
        free = dict.fromkeys((GPU, NETWORK), 0.0)
        ends: dict[str, float] = {}
        starts: dict[str, float] = {}
        for phase in phases:
            starts[phase.name] = max([free[stream] for stream in phase.on] + [ends[name] for name in phase.after])
            ends[phase.name] = starts[phase.name] + phase.us
            free.update({stream: starts[phase.name] + us for stream, us in phase.on.items()})
        return cls(phases, starts)

    @property
    def us(self) -> float:
        """The end of the last phase."""
        return max(self.starts[phase.name] + phase.us for phase in self.phases)


def iteration(model: Dlrm, cluster: Cluster, form: str) -> Timeline:
    """Return the timeline of one iteration of the busiest rank.

    Args:
        model: sizes.
        cluster: GPUs.
        form: UNFUSED looks up with the gather of the fused kernel, and then calls NCCL. TORCH looks up with a call of
            embedding_bag for each table, and copies. FUSED is one kernel. BOTH fuses the update of the tables with the
            all-to-all of gradients as well, which moecomm has no kernel for.
    """
    return Timeline.of([*_forward(model, cluster, form), *_backward(model, cluster, form)])


def _forward(model: Dlrm, cluster: Cluster, form: str) -> list[IterationPhase]:
    lookups, products = model.lookups(cluster.gpus), cluster.gpu.products
    bottom = _computed("bottom MLP", sum(map(products.us, model.layers("bottom"))))
    if form in (FUSED, BOTH):
        pair = [bottom, _fused("lookups + all-to-all", cluster.fused_us(lookups), lookups, cluster)]
    else:  # the bottom MLP runs while sums travel, as in facebookresearch/dlrm
        gather_us = cluster.gpu.bags.gather_us(lookups)
        if form == TORCH:
            gather_us = cluster.gpu.torch_bags.us(lookups) + cluster.copy_us(lookups.out_bytes)
        pair = [_computed("lookups", gather_us), _exchange("all-to-all", lookups, cluster, "lookups"), bottom]
    return [
        *pair,
        _computed("interactions", _interactions_us(model, cluster), *(phase.name for phase in pair)),
        _computed("top MLP", sum(map(products.us, model.layers("top")))),
    ]


def _backward(model: Dlrm, cluster: Cluster, form: str) -> list[IterationPhase]:
    lookups = model.lookups(cluster.gpus)
    bottom = _computed("bottom MLP, backward", _backward_us(model, cluster, "bottom"))
    if form == BOTH:
        fused_us = cluster.fused_update_us(lookups)
        sparse = [bottom, _fused("all-to-all of gradients + update", fused_us, lookups, cluster)]
    else:
        exchange = _exchange("all-to-all of gradients", lookups, cluster, "interactions, backward")
        sparse = [exchange, bottom, _computed("update of tables", cluster.update_us(lookups), exchange.name)]
    weights = model.parameters("top") + model.parameters("bottom")
    reduce_us = cluster.all_reduce_us(weights * model.item_bytes)
    # The all-reduce is behind the all-to-all, for which the update of tables waits.
    reduce = IterationPhase("all-reduce of MLP gradients", {NETWORK: reduce_us}, ("top MLP, backward", bottom.name))
    return [
        _computed("top MLP, backward", _backward_us(model, cluster, "top")),
        _computed("interactions, backward", 2 * _interactions_us(model, cluster)),
        *sparse,
        reduce,
        _computed("update of MLPs", cluster.gpu.products.work_us(0, weights * _DENSE_BYTES), reduce.name),
    ]


def _computed(name: str, us: float, *after: str) -> IterationPhase:
    return IterationPhase(name, {GPU: us}, after)


def _exchange(name: str, lookups: Lookups, cluster: Cluster, after: str) -> IterationPhase:
    return IterationPhase(name, {NETWORK: cluster.all_to_all_us(lookups.out_bytes)}, (after,))


def _fused(name: str, us: float, lookups: Lookups, cluster: Cluster) -> IterationPhase:
    """Return the phase of a fused kernel: its warps wait for arrivals, so that it has the GPU to its end."""
    return IterationPhase(name, {GPU: us, NETWORK: min(us, cluster.wire_us(lookups))})


def _interactions_us(model: Dlrm, cluster: Cluster) -> float:
    """Return the time of the forward interactions: features are read once for each of their one or two products."""
    read = model.samples * model.features * model.columns * model.item_bytes
    flops = 2 * model.samples * model.interactions * model.columns
    written = model.samples * model.interactions * model.item_bytes
    if model.projection:
        return 2 * cluster.gpu.products.work_us(flops, read + written / 2)
    return cluster.gpu.products.work_us(2 * flops, read + 2 * written)


def _backward_us(model: Dlrm, cluster: Cluster, which: str) -> float:
    """Return the time of the gradients of weights and of inputs; the bottom MLP's input needs none."""
    weights = [Product(one.columns, one.depth, one.rows) for one in model.layers(which)]
    inputs = [Product(one.rows, one.depth, one.columns) for one in model.layers(which)]
    return sum(map(cluster.gpu.products.us, weights + inputs[which == "bottom" :]))
