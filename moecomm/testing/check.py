"""A check of one case: dispatch and combine through Buffers must equal the reference bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from moecomm import combine
from moecomm.base import formats
from moecomm.buffer import Buffer
from moecomm.combine import reference as combine_reference
from moecomm.combine.arguments import takes_weights
from moecomm.dispatch import reference as dispatch_reference
from moecomm.dispatch.routed import Routed
from moecomm.errors import BadInput
from moecomm.testing.cases import Case
from moecomm.testing.ranks import LocalBuffers


def check_case(ranks: LocalBuffers, case: Case) -> None:
    """Run a case on all ranks of this process and compare it with the reference.

    Raises:
        AssertionError: the first difference, with the seed of the case.
    """
    wanted = Wanted(case, ranks.buffers[0])
    calls = [dispatch_call(case, rank, ranks.device) for rank in range(wanted.ranks)]

    def combine(routed: list[Routed]) -> list[Any]:
        return ranks.combine([wanted.combine_call(rank, here) for rank, here in enumerate(routed)])

    try:
        if case.begin:
            earlier = ranks.dispatch(calls)
            routed = ranks.dispatch_begin(calls)
            _check_closed(routed[0])
            between = combine(earlier)
            routed = ranks.dispatch_end(routed)
        else:
            routed, between = ranks.dispatch(calls), []
        ranks.check()
        for rank, here in enumerate(routed):
            wanted.check_routed(rank, here)
        if case.again:
            repeated = ranks.dispatch([again_call(calls[rank], here) for rank, here in enumerate(routed)])
            ranks.check()
            for rank, here in enumerate(repeated):
                wanted.check_again(rank, here)
        results = [between, combine(routed)] if between else [combine(routed)]
        ranks.check()
        for result in results:
            for rank, here in enumerate(result):
                wanted.check_combined(rank, here)
    except AssertionError as error:
        raise AssertionError(f"case of seed {case.seed} ({case.layout}): {error}") from error


def check_case_on_rank(buffer: Buffer, case: Case) -> None:
    """Run a case on one rank of a group of processes and compare it with the reference. Every process makes the same
    case.

    Raises:
        AssertionError: the first difference, with the seed of the case.
    """
    wanted, rank = Wanted(case, buffer), buffer.rank
    call = dispatch_call(case, rank, buffer.device)
    try:
        if case.begin:
            earlier = buffer.dispatch(**call)
            routed = buffer.dispatch_begin(**call)
            _check_closed(routed)
            between = buffer.combine(**wanted.combine_call(rank, earlier))
            buffer.dispatch_end(routed)
        else:
            routed = buffer.dispatch(**call)
        buffer.check()
        wanted.check_routed(rank, routed)
        if case.again:
            repeated = buffer.dispatch(**again_call(call, routed))
            buffer.check()
            wanted.check_again(rank, repeated)
        result = buffer.combine(**wanted.combine_call(rank, routed))
        buffer.check()
        wanted.check_combined(rank, result)
        if case.begin:
            wanted.check_combined(rank, between)
    except AssertionError as error:
        raise AssertionError(f"case of seed {case.seed} ({case.layout}): {error}") from error


def dispatch_call(case: Case, rank: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of Buffer.dispatch on this rank."""
    weights = case.topk_weights[rank]
    return {
        "x": case.x[rank].to(device),
        "topk_idx": case.topk_idx[rank].to(device),
        "topk_weights": None if weights is None else weights.to(device),
        "layout": case.layout,
        "expert_alignment": case.alignment,
        "quantize": case.quantize,
        "scale_format": case.scale_format,
        "scale_layout": case.scale_layout,
        "scales": None if case.scales is None else case.scales[rank].to(device),
        "x_global_scale": case.global_scale,
        "extras": tuple(extra.to(device) for extra in case.extras[rank]) if case.extras else (),
        "num_sms": case.workers,
        "max_rows": None if case.max_rows is None else case.max_rows[rank],
        **({"sync": False} if case.layout == "flat" and case.max_rows is not None else {}),
    }


def again_call(call: dict[str, Any], routed: Routed) -> dict[str, Any]:
    """Return arguments of Buffer.dispatch that repeat `call` through its handle, with the rows in reverse order."""
    kept = ("x_global_scale", "layout", "expert_alignment", "quantize", "scale_format", "scale_layout", "num_sms")
    again = {name: call[name] for name in kept} | {"x": _flipped([call["x"]])[0], "handle": routed.handle}
    again["extras"] = tuple(_flipped(list(call["extras"])))
    return again if call["scales"] is None else again | {"scales": _flipped([call["scales"]])[0]}


class Wanted:
    """The results that the reference gives for a case."""

    def __init__(self, case: Case, buffer: Buffer) -> None:
        self.case, self.ranks, self.buffer = case, len(case.x), buffer
        self.arrived = self._arrived(case.x, case.scales)
        self.again = self._arrived(_flipped(case.x), case.scales and _flipped(case.scales)) if case.again else []
        self.y = [_experts(here, 0.5 + rank, buffer.hidden).to(buffer.dtype) for rank, here in enumerate(self.arrived)]
        self.grads = _weight_grads(case, self.arrived) if case.weight_grads else None
        self.own_weights = case.own_weights if takes_weights(buffer.rounds) else None
        self.out = combine_reference.combine(
            self.y,
            self.arrived,
            layout=case.layout,
            weighted=case.weighted,
            bias=case.bias,
            wire=case.wire,
            domain_ranks=buffer.domain_ranks,
            topk_weights=self.own_weights,
        )
        self.out_grads = None
        if self.grads is not None:
            self.out_grads = combine_reference.combine_weight_grads(self.grads, self.arrived, layout=case.layout)

    def _arrived(self, x: list[torch.Tensor], scales: list[torch.Tensor] | None) -> list[dispatch_reference.Arrived]:
        if self.case.quantize:
            how: dict[str, Any] = {"scale_format": self.case.scale_format, "global_scale": self.case.global_scale}
            quantized = [formats.quantize(t, self.case.quantize, **how) for t in x]
            x, made = [rows for rows, _ in quantized], [beside for _, beside in quantized if beside is not None]
            scales = made or None
        return dispatch_reference.dispatch(
            x,
            [self._slots(rank) for rank in range(self.ranks)],
            self.case.topk_weights,
            num_experts=self.buffer.rounds.num_experts,
            layout=self.case.layout,
            expert_alignment=self.case.alignment,
            max_tokens=self.buffer.max_tokens,
            max_rows=self._max_rows(),
            scales=scales,
        )

    def _max_rows(self) -> list[int] | None:
        """Return max_rows of the case; for batched rows without any, the rows per expert that ranks make room for."""
        settings = self.buffer.rounds.settings
        if self.case.layout != "batched" or self.case.max_rows is not None:
            return self.case.max_rows
        rows = [settings.capacity_rows("batched", rank=rank) for rank in range(self.ranks)]
        return [count // settings.local_experts(rank) for rank, count in enumerate(rows)]

    def _slots(self, rank: int) -> torch.Tensor:
        """Return the ids of a rank as rounds know them."""
        ids, placement = self.case.topk_idx[rank], self.buffer.placement
        if placement is None:
            return ids
        counts = None
        if placement.choice == "balanced":
            each = [given.flatten().long() for given in self.case.topk_idx]
            counts = torch.stack([torch.bincount(one[one >= 0], minlength=placement.num_experts) for one in each])
        return placement.slots_of(ids, rank, self.buffer.domain_ranks, counts=counts)

    def combine_call(self, rank: int, routed: Routed) -> dict[str, Any]:
        """Return the arguments of Buffer.combine on this rank."""
        case, shape, device = self.case, routed.handle.y_shape, routed.x.device
        call: dict[str, Any] = {
            "y": _padded(self.y[rank], shape).to(device),
            "handle": routed.handle,
            "weighted": case.weighted,
            "wire": case.wire,
            "num_sms": case.workers,
        }
        if case.in_window:
            rounds = routed.handle.rounds
            call["y"] = combine.empty(rounds, routed.handle, rounds.dtype).copy_(call["y"])
        if (bias := case.bias[rank]) is not None:
            call["bias"] = bias.to(device)
        if self.own_weights is not None:
            call["topk_weights"] = self.own_weights[rank].to(device)
        if self.grads is not None:
            grads = self.grads[rank]
            call["weight_grads"] = _padded(grads, (*shape[:-1], *grads.shape[1:])).to(device)
        return call

    def check_routed(self, rank: int, got: Routed) -> None:
        """Raise AssertionError unless `got` equals the reference of rank `rank`."""
        self._check_rows(f"rank {rank}", got, self.arrived[rank])

    def check_again(self, rank: int, got: Routed) -> None:
        """Raise AssertionError unless `got` equals the reference of the repeated dispatch on rank `rank`."""
        self._check_rows(f"rank {rank}, again", got, self.again[rank])

    def _check_rows(self, where: str, got: Routed, want: dispatch_reference.Arrived) -> None:
        layout = self.case.layout
        _same(f"{where}: tokens_per_expert", got.tokens_per_expert, want.tokens_per_expert)
        align = self.case.alignment if layout == "expert" else 1
        padded = -(-want.tokens_per_expert.long() // align) * align
        _same(f"{where}: rows_per_expert", got.rows_per_expert, padded)
        assert got.num_rows.item() == want.num_rows, f"{where}: num_rows {got.num_rows.item()}, want {want.num_rows}"
        valid = None if layout == "flat" else (want.src[:, 0] >= 0).nonzero().flatten()  # None: all
        scales = want.scales
        if scales is not None and self.case.scale_layout == "column":
            scales = dispatch_reference.by_column(scales)
            _check_columns(where, got.scales)
        for name in ("x", "scales", "src", "topk_idx", "topk_weights", "row_weights"):
            mine, theirs = getattr(got, name), scales if name == "scales" else getattr(want, name)
            assert (mine is None) == (theirs is None), f"{where}: {name} is {'missing' if mine is None else 'there'}"
            if mine is None or theirs is None:
                continue
            if name == "scales" and self.case.scale_layout == "swizzled":
                mine = formats.unswizzle(mine, got.x.shape[-2], theirs.shape[1])
            rows = (mine.flatten(0, 1) if layout == "batched" else mine)[: len(want.x)].cpu()
            assert rows.dtype == theirs.dtype, f"{where}: {name} of {rows.dtype}, want {theirs.dtype}"
            if layout == "expert" and name in ("src", "row_weights"):  # defined in padding rows too
                _same(f"{where}: {name}", rows, theirs)
            elif valid is None:
                _same(f"{where}: {name}", _bytes(rows), _bytes(theirs))
            else:
                _same(f"{where}: {name}", _bytes(rows)[valid], _bytes(theirs)[valid])
        self._check_extras(where, got, want, valid)
        if layout == "flat" and self.case.max_rows is not None:
            all_rows: Any = dispatch_reference.unused(want, len(got.x))
            for name, rows in zip(("topk_idx", "topk_weights"), all_rows, strict=True):
                _same(f"{where}: {name}, all rows", getattr(got, name), rows)

    def _check_extras(
        self, where: str, got: Routed, want: dispatch_reference.Arrived, valid: torch.Tensor | None
    ) -> None:
        flips = where.endswith("again")
        for at, extra in enumerate(got.extras):
            rows = (extra.flatten(0, 1) if self.case.layout == "batched" else extra)[: len(want.x)].cpu()
            rows, src = (rows, want.src) if valid is None else (rows[valid], want.src[valid])
            sent = [extras[at] for extras in self.case.extras]
            sent = _flipped(sent) if flips else sent
            theirs = [sent[rank][token] for rank, token in src.tolist()]
            _same(f"{where}: extras[{at}]", _bytes(rows), _bytes(torch.stack(theirs)) if theirs else _bytes(rows))

    def check_combined(self, rank: int, result: Any) -> None:
        """Raise AssertionError unless `result` equals the reference of combine on rank `rank`."""
        if self.out_grads is not None:
            result, grads = result
            _same(f"rank {rank}: weight_grads", grads, self.out_grads[rank])
        _same(f"rank {rank}: combine", result, self.out[rank])


def _flipped(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return each tensor with its rows in reverse order."""
    return [t[torch.arange(len(t) - 1, -1, -1, device=t.device)] for t in rows]


def _check_closed(routed: Routed) -> None:
    """Raise AssertionError unless reading the rows of an unfinished dispatch raises BadInput."""
    try:
        _ = routed.x
    except BadInput:
        return
    raise AssertionError("x could be read before dispatch_end")


def _check_columns(where: str, scales: Any) -> None:
    if scales is None or scales.numel() == 0:
        return  # another check reports missing scales; empty ones have no strides
    *groups, rows, columns = scales.shape
    step = -(-rows // 4) * 4
    want = (*((columns * step,) if groups else ()), 1, step)
    assert scales.stride() == want, f"{where}: scales have strides {scales.stride()}, want {want}"


def _experts(arrived: dispatch_reference.Arrived, scale: float, hidden: int) -> torch.Tensor:
    """Return stand-ins for expert outputs: distinct rows, with NaN in padding, which combine must not read."""
    if arrived.x.is_floating_point() and arrived.x.shape[1] == hidden:
        y = arrived.x.float() * scale
    else:  # bytes
        y = torch.sin(torch.arange(len(arrived.x) * hidden).view(-1, hidden) * scale)
    y[arrived.src[:, 0] < 0] = torch.nan
    return y


def _weight_grads(case: Case, arrived: list[dispatch_reference.Arrived]) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(case.seed)
    flat = case.layout == "flat"
    return [torch.randn(len(a.x), *((case.topk_idx[0].shape[1],) if flat else ()), generator=g) for a in arrived]


def _padded(rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of `shape` that starts with `rows`; the rest is NaN, so that a wrong read shows in the result."""
    if rows.numel() == torch.Size(shape).numel():
        return rows.reshape(shape)
    full = torch.full(shape, torch.nan, dtype=rows.dtype)
    full[: len(rows)] = rows
    return full


def _bytes(t: torch.Tensor) -> torch.Tensor:
    if t.ndim == 1:
        return t
    if t.stride() != (t.shape[1], 1):  # contiguous() leaves odd strides where a dimension is 1
        t = torch.empty(t.shape, dtype=t.dtype).copy_(t)
    return t.view(torch.uint8)


def _same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    got = got.cpu()
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if torch.equal(got, want):
        return
    equal = (got == want) | (got.isnan() & want.isnan()) if got.is_floating_point() else got == want
    assert bool(equal.all()), (
        f"{what}: {int((~equal).sum())} of {equal.numel()} differ, first at {(~equal).nonzero()[0].tolist()}"
    )
