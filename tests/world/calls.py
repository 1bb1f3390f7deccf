"""The calls of a sequence: how each is made on a rank, and how its result is compared with the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import moecomm
from moecomm import formats, fused, ops

from . import model, payloads
from .case import Inputs, Step, draw_placement, expert_weights
from .model import INNER, Round, State

KEPT = 3  # dispatches whose outputs a rank keeps


class Skip(Exception):
    """The state of the ranks does not allow this step."""


@dataclass
class Kept:
    """A dispatch whose outputs are alive, and what they must be."""

    round: Round
    routed: Any
    options: dict[str, Any]
    seed: int
    sent: list[dict[str, Any]]


@dataclass
class Rank:
    """One rank of a sequence.

    Attributes:
        member: its number in the case.
        state: what all ranks know.
        executor: brings ranks together.
        buffer: None: outside.
        kept: dispatches with a handle that can be used, oldest first.
        weights: ExpertWeights that are open.
        version: of their values.
    """

    member: int
    state: State
    executor: Any
    buffer: Any = None
    kept: list[Kept] = None  # type: ignore[assignment]
    weights: Any = None
    version: int = 0
    layers: int = 0

    def __post_init__(self) -> None:
        self.kept = []

    @property
    def rank(self) -> int:
        """Return the number in the Buffer that the model has for it."""
        return self.state.members.index(self.member)

    def tensors_of(self, expert: int, version: int) -> tuple[torch.Tensor, ...]:
        """Return w13, w2 and the biases of an expert."""
        return expert_weights(expert, version, self.state.hidden, INNER, self.state.dtype)

    def weights_of(self, version: int) -> list[torch.Tensor]:
        """Return tensors `[slots, ...]` of the experts of this rank: w13, w2, and biases."""
        each = [self.tensors_of(expert, version) for expert in self.state.held[self.rank]]
        return [torch.stack(tensors) for tensors in zip(*each, strict=True)]


Differing = dict[str, tuple[dict[str, Any], dict[str, Any]]]  # options of all ranks, and of one beside them
Prepared = tuple[Callable[[], Any], Callable[[Any], None]]  # a call, and a check of its result


class Dispatch:
    """Buffer.dispatch, with all that it takes, or its two halves."""

    bad = ("rows of another dtype", "too many tokens", "ids of another shape", "no layout")
    # What all ranks pass, and what one of them passes: each is a Mismatch by docs/formats.md and docs/failures.md.
    differ: ClassVar[Differing] = {
        "layout": ({"layout": "expert"}, {"layout": "flat"}),
        "type of ids": ({}, {"ids": "other"}),
        "alignment": ({"layout": "expert", "alignment": 1}, {"layout": "expert", "alignment": 8}),
        "quantize": ({"payload": "plain"}, {"payload": "quantize fp8"}),
        "type of rows": ({"payload": "bytes int16 4"}, {"payload": "bytes uint16 4"}),
        "type of narrow rows": ({"payload": "given int8_token"}, {"payload": "given fp8_token"}),
        "width of rows": ({"payload": "bytes uint8 5"}, {"payload": "bytes uint8 9"}),
        "type of scales": ({"payload": "scaled float32 1"}, {"payload": "scaled int32 1"}),
        "width of scales": ({"payload": "scaled uint8 1"}, {"payload": "scaled uint8 3"}),
        "type of extras": ({"extras": ["int64 1"]}, {"extras": ["float64 1"]}),
        "width of extras": ({"extras": ["uint8 1"]}, {"extras": ["uint8 3"]}),
        "number of extras": ({"extras": []}, {"extras": ["int64 1"]}),
        "global scale": ({"payload": "quantize nvfp4"}, {"payload": "quantize nvfp4 other"}),
    }

    def options(self, rank: Rank, step: Step, twist: str, mine: bool) -> dict[str, Any]:
        """Return the options of the call on this rank."""
        options, state = dict(step.options), rank.state
        common, own = self.differ.get(twist, ({}, {}))
        if common:
            options.update({"begin": False, **common})
        if mine:
            options.update(own)
        if state.hidden % 32 and options.get("payload", "").startswith(("quantize", "given")):
            options["payload"] = "plain"
        if not rank.executor.rounds_fail:
            options["room"] = "enough"
        if options.get("room") in ("few", "drop") and (state.several_domains or options.get("begin")):
            options["room"] = ""
        if options.get("room") == "drop" and state.choice == "balanced":
            options["room"] = ""
        return options

    def prepare(self, rank: Rank, step: Step, twist: str = "", mine: bool = False) -> Prepared:
        """Return the call, and its check."""
        state, here = rank.state, rank.rank
        options = self.options(rank, step, twist, mine)
        if twist in ("global scale", "type of narrow rows", "quantize") and state.hidden % 32:
            raise Skip
        layout, payload = options.get("layout", "expert"), options.get("payload", "plain")
        extras, begin = options.get("extras", []), options.get("begin", False)
        mine_in = state.inputs(step, here)
        sent = [
            {**payloads.rows_of(payload, one.x, step.seed * 64 + nth)}
            | {"extras": payloads.extras_of(extras, len(one.x), step.seed * 64 + nth)}
            for nth, one in enumerate(state.inputs(step, r) for r in range(len(state.members)))
        ]
        given: dict[str, Any] = {"layout": layout, "topk_idx": mine_in.ids, "topk_weights": mine_in.weights}
        given |= sent[here]
        if layout == "expert":
            given["expert_alignment"] = options.get("alignment", 1)
        if options.get("workers"):
            given["num_sms"] = options["workers"]
        room = options.get("room", "")
        worst = len(state.members) * state.max_tokens * state.topk
        if room == "enough" or (begin and room != "enough"):  # halves take no chunks
            given["max_rows"] = len(state.members) * state.max_tokens if layout == "batched" else worst
            if layout == "expert":
                given["max_rows"] += state.slots * given["expert_alignment"]
        if room == "few":
            given |= {"max_rows": 3, "overflow": "error"}
            given.pop("expert_alignment", None)
        if room == "drop":
            given |= {"overflow": "drop"}
        if room == "chunks":
            given |= {"overflow": "chunks"}
        if twist:
            self.twist(given, twist, mine, state, mine_in)
        chunks = not room or room == "chunks"
        round_ = Round.of(state, step, chunks=chunks)
        limit = self.most_rows(round_, layout) if room == "few" else 0
        if room == "few" and limit is None:
            raise Skip  # the documentation leaves open whether rows find room
        if layout == "batched" and self.too_many_duplicates(round_):
            raise Skip

        def call() -> Any:
            if not begin:
                return rank.buffer.dispatch(**given)
            given.pop("overflow", None)
            routed = rank.buffer.dispatch_begin(**given)
            if rank.kept and options.get("between") and (old := rank.kept[-1]).options.get("layout") != "flat":
                Combine.by_weights(rank, old)
            return rank.buffer.dispatch_end(routed)

        def check(routed: Any) -> None:
            assert not (limit or 0) > 3, "more rows than room, and no error"
            kept = Kept(round_, routed, options, step.seed, sent)
            if room == "drop":
                return  # which entries have room is the subject of tests/test_capacity.py
            check_arrived(rank, kept, here)
            rank.kept.append(kept)
            while len(rank.kept) > KEPT:
                rank.kept.pop(0)

        if limit is not None and limit > 3:
            return expecting(call, moecomm.TooManyRows)
        return call, check

    @staticmethod
    def most_rows(round_: Round, layout: str) -> int | None:
        """Return the most rows of a rank, or of a slot in `batched`."""
        if round_.slots is None:
            return None
        if layout == "flat":
            return max(len(round_.flat(rank) or []) for rank in range(len(round_.held)))
        groups = [round_.groups(rank) or [] for rank in range(len(round_.held))]
        if layout == "batched":
            return max(len(group) for mine in groups for group in mine)
        return max(sum(map(len, mine)) for mine in groups)

    @staticmethod
    def too_many_duplicates(round_: Round) -> bool:
        """Return whether a token may have an expert twice, of which `batched` has no room for many."""
        return any(len(set(row)) < len(row) for ids in round_.ids for row in ids.tolist() if row and max(row) >= 0)

    def twist(self, given: dict[str, Any], twist: str, mine: bool, state: State, one: Inputs) -> None:
        """Change arguments so that they are bad."""
        if not mine:
            return
        if twist == "rows of another dtype":
            given["x"] = given["x"].double()
        if twist == "too many tokens":
            tokens = state.max_tokens + 1
            given["x"] = torch.zeros(tokens, state.hidden, dtype=getattr(torch, state.dtype))
            given |= {"topk_idx": torch.zeros(tokens, state.topk, dtype=torch.int64), "topk_weights": None}
            given |= {"extras": (), "scales": None, "quantize": None, "x_global_scale": None}
        if twist == "ids of another shape":
            given["topk_idx"] = torch.zeros(len(one.ids) + 1, state.topk, dtype=one.ids.dtype)
        if twist == "type of ids":
            given["topk_idx"] = one.ids.to(torch.int32 if one.ids.dtype == torch.int64 else torch.int64)
        if twist == "no layout":
            given["layout"] = "rows"
        if twist == "bad id":
            given["topk_idx"] = one.ids.clone()
            given["topk_idx"][-1, -1] = state.num_experts if given["layout"] != "flat" else -2


def expecting(call: Callable[[], Any], error: type[BaseException]) -> Prepared:
    """Return a call that must raise on every rank, after which Buffers go on."""

    def run() -> Any:
        try:
            call()
        except error:
            return None
        raise AssertionError(f"no {error.__name__}")

    return run, lambda _: None


def check_arrived(rank: Rank, kept: Kept, here: int) -> None:
    """Raise AssertionError unless the rows of a dispatch are those of the model."""
    routed, options, round_ = kept.routed, kept.options, kept.round
    layout, payload = options.get("layout", "expert"), options.get("payload", "plain")
    what = f"{layout} rows of {payload!r}"
    if layout == "flat":
        src = round_.flat(here)
        got = [tuple(pair) for pair in routed.src.tolist()][: int(routed.num_rows)]
        if src is not None:
            assert got == src, f"{what} come from {got}, not {src}"
        local = routed.topk_idx[: len(got)].tolist()
        weights = routed.topk_weights[: len(got)]
        for nth, (source, token) in enumerate(got):
            ids, used = round_.ids[source][token].tolist(), round_.sent[source].used_weights[token]
            for k, slot in enumerate(local[nth]):
                if round_.slots is not None:
                    want = int(round_.slots[source][token, k])
                    want = want % round_.stride if want >= 0 and want // round_.stride == here else -1
                    assert slot == want, f"{what}: row {nth}, k {k} is for slot {slot}, not {want}"
                assert slot < 0 or round_.held[here][slot] == ids[k], f"{what}: row {nth} is for another expert"
                wanted = float(used[k].float()) if slot >= 0 else 0.0
                assert float(weights[nth, k]) == wanted, f"{what}: weight of row {nth}, k {k}"
        rows, scales, extras = routed.x[: len(got)], routed.scales, [e[: len(got)] for e in routed.extras]
        scales = None if scales is None else scales[: len(got)]
    else:
        groups = round_.groups(here)
        counts = routed.tokens_per_expert.tolist()
        if groups is not None:
            want_counts = [len(group) for group in groups]
            assert counts == want_counts, f"{what}: rows by slot are {counts}, not {want_counts}"
        first, at = [], 0
        for count, padded in zip(counts, routed.rows_per_expert.tolist(), strict=True):
            first.append(at)
            at += padded
            assert padded >= count and (layout == "batched" or padded - count < options.get("alignment", 1)), what

        def used(tensor: Any) -> Any:
            if tensor is None:
                return None
            if layout == "batched":
                return torch.cat([tensor[nth, :count] for nth, count in enumerate(counts)])
            return torch.cat([tensor[at : at + count] for at, count in zip(first, counts, strict=True)])

        got = [tuple(pair) for pair in used(routed.src).tolist()]
        if groups is not None:
            src = [(source, token) for group in groups for source, token, _ in group]
            assert got == src, f"{what} come from {got}, not {src}"
            weights = [float(round_.sent[s].used_weights[t, k].float()) for group in groups for s, t, k in group]
            assert used(routed.row_weights).tolist() == weights, f"{what}: weights"
        else:
            slots = [slot for slot, count in enumerate(counts) for _ in range(count)]
            for slot, (source, token) in zip(slots, got, strict=True):
                expert = round_.held[here][slot]
                assert expert in round_.ids[source][token].tolist(), f"{what}: slot {slot} has a row for another"
        if layout == "expert":
            padding = torch.ones(len(routed.src), dtype=torch.bool)
            for at, count in zip(first, counts, strict=True):
                padding[at : at + count] = False
            padding[int(routed.num_rows) :] = False
            assert bool((routed.src[padding] == -1).all()), f"{what}: padding has sources"
        rows, scales, extras = used(routed.x), used(routed.scales), [used(extra) for extra in routed.extras]
    payloads.check_rows(what, payload, rows, scales, kept.sent, got)
    assert len(extras) == len(options.get("extras", [])), f"{what}: {len(extras)} extras"
    for nth, extra in enumerate(extras):
        want = [kept.sent[source]["extras"][nth][token] for source, token in got]
        if want:
            payloads.same(f"{what}: extras {nth}", extra, torch.stack(want))


def experts_rows(kept: Kept, here: int, dtype: torch.dtype, weighted: bool = True) -> torch.Tensor:
    """Return what experts make of the rows that arrived: each row of x, in float64, times the factor of the expert.

    Rows without a token are NaN, which no sum may read.
    """
    routed, round_ = kept.routed, kept.round
    src = routed.src
    y = torch.full((*src.shape[:-1], round_.sent[0].x.shape[1]), torch.nan).double()
    if kept.options.get("layout", "expert") == "flat":
        for nth in range(int(routed.num_rows)):
            source, token = src[nth].tolist()
            x, used = round_.sent[source].x[token].double(), routed.topk_weights[nth]
            local = routed.topk_idx[nth].tolist()
            y[nth] = x * sum(
                float(used[k]) * model.factor(round_.held[here][slot]) for k, slot in enumerate(local) if slot >= 0
            )
        return y.to(dtype)
    at = 0
    for slot, (count, padded) in enumerate(
        zip(routed.tokens_per_expert.tolist(), routed.rows_per_expert.tolist(), strict=True)
    ):
        for nth in range(count):
            place = (slot, nth) if src.ndim == 3 else (at + nth,)
            source, token = src[place].tolist()
            y[place] = round_.sent[source].x[token].double() * model.factor(round_.held[here][slot])
        at += padded
    return y.to(dtype)


class Combine:
    """Buffer.combine of the outputs of an earlier dispatch."""

    bad = ("y of another shape", "no handle", "no wire")
    differ: ClassVar[Differing] = {
        "wire": ({"wire": None}, {"wire": "exact"}),
        "dtype of y": ({"y": "bfloat16"}, {"y": "float16"}),
        "weights given": ({"weighted": True, "own weights": False}, {"weighted": True, "own weights": True}),
    }

    @staticmethod
    def by_weights(rank: Rank, kept: Kept) -> None:
        """Combine, and compare the sum."""
        run, check = Combine().prepare(rank, Step("combine", options={"kept": -1}))
        check(run())

    def prepare(self, rank: Rank, step: Step, twist: str = "", mine: bool = False) -> Prepared:
        """Return the call, and its check."""
        if not rank.kept:
            raise Skip
        state, here, kept = rank.state, rank.rank, rank.kept[step.options.get("kept", -1) % len(rank.kept)]
        options = dict(step.options)
        common, own = self.differ.get(twist, ({}, {}))
        options.update(common | (own if mine else {}))
        layout = kept.options.get("layout", "expert")
        wire, weighted = options.get("wire"), options.get("weighted", True)
        if layout == "flat":
            if twist in ("wire", "weights given"):
                raise Skip
            weighted, wire = True, None if wire == "rows" or wire == "exact" else wire
        if wire in ("fp8", "int8") and state.hidden % 16:
            wire = None
        if wire == "rows" and state.several_domains:
            wire = None
        dtype = options.get("y") or state.dtype
        if twist == "weights given" and state.several_domains:
            raise Skip
        if twist == "wire" and dtype == "float32":
            raise Skip  # "exact" is then the same
        sent, ids = kept.round.sent[here], kept.round.ids[here]
        weights = sent.used_weights if weighted or layout == "flat" else torch.ones(ids.shape).double()
        y = experts_rows(kept, here, getattr(torch, dtype))
        given: dict[str, Any] = {"y": y, "handle": kept.routed.handle}
        if options.get("inside"):
            given["y"] = rank.buffer.empty(kept.routed.handle, y.dtype)
            given["y"][:] = y
        if layout != "flat":
            given |= {"weighted": weighted, "wire": wire}
        elif wire is not None:
            given["wire"] = wire
        g = torch.Generator().manual_seed(step.seed)
        bias = None
        if options.get("bias"):
            shape = (state.hidden,) if options["bias"] == "one" else tuple(sent.x.shape)
            bias = given["bias"] = torch.randn(shape, generator=g).to(y.dtype)
        if options.get("out"):
            given["out"] = torch.empty(sent.x.shape, dtype=y.dtype)
        if options.get("own weights") and layout != "flat" and weighted and not state.several_domains:
            given["topk_weights"] = torch.randn(ids.shape, generator=g)
            weights = given["topk_weights"].double()
        want = model.sum_of(sent, ids, weights, wire, dtype, bias)
        if mine:
            if twist == "y of another shape":
                given["y"] = given["y"][..., :-1]
            if twist == "no handle":
                given["handle"] = None
            if twist == "no wire":
                given["wire"] = "bits"

        def check(out: Any) -> None:
            if "out" in given:
                assert out is given["out"]
            assert out.dtype == y.dtype
            want.check(f"combine of {layout} rows by wire {wire}", out)

        return lambda: rank.buffer.combine(**given), check


class Repeat:
    """A dispatch of other rows along the route of an earlier one."""

    bad = ("rows of another dtype",)
    differ: ClassVar[Differing] = {}

    def prepare(self, rank: Rank, step: Step, twist: str = "", mine: bool = False) -> Prepared:
        """Return the call, and its check."""
        plain = [one for one in rank.kept if one.options.get("payload", "plain") == "plain"]
        if not plain:
            raise Skip
        kept, here = plain[step.options.get("kept", -1) % len(plain)], rank.rank
        if kept.options.get("extras"):
            raise Skip
        sent = [replace(one, x=-one.x) for one in kept.round.sent]
        x = sent[here].x.double() if twist and mine else sent[here].x
        again = Kept(
            replace(kept.round, sent=sent), None, kept.options, step.seed, [{"x": s.x, "extras": ()} for s in sent]
        )

        def check(routed: Any) -> None:
            again.routed = routed
            layout = kept.options.get("layout", "expert")
            if layout == "flat":
                n = int(routed.num_rows)
                payloads.same("flat rows again", routed.x[:n], -kept.routed.x[:n])
                return
            for slot, count in enumerate(kept.routed.tokens_per_expert.tolist()):
                if layout == "batched":
                    payloads.same("batched rows again", routed.x[slot, :count], -kept.routed.x[slot, :count])
            if layout == "expert":
                used = kept.routed.src[:, 0] >= 0
                payloads.same("expert rows again", routed.x[used], -kept.routed.x[used])

        return lambda: rank.buffer.dispatch(x, handle=kept.routed.handle), check


class Moe:
    """Buffer.moe with weights in every format."""

    bad = ("rows of another dtype", "w13 of another shape")
    differ: ClassVar[Differing] = {"wire": ({"wire": None}, {"wire": "fp8"})}

    def prepare(self, rank: Rank, step: Step, twist: str = "", mine: bool = False) -> Prepared:
        """Return the call, and its check."""
        state, here, options = rank.state, rank.rank, dict(step.options)
        common, own = self.differ.get(twist, ({}, {}))
        options.update(common | (own if mine else {}))
        wire = options.get("wire")
        if twist == "wire" and state.hidden % 16:
            raise Skip
        if wire in ("fp8", "int8") and state.hidden % 16:
            wire = None
        if wire == "rows" and state.several_domains:
            wire = None
        one = state.inputs(step, here)
        round_ = Round.of(state, step)
        activation, biases = options.get("activation", "swiglu"), options.get("biases", False)
        kind = options.get("format", "plain") if state.hidden % 32 == 0 and not biases else "plain"
        if state.dtype == "float32" or (kind.endswith("mxfp4") and state.dtype != "bfloat16"):
            kind = "plain"
        balance, version = None, step.seed
        w13, w2, b13, b2 = rank.weights_of(version)
        if rank.weights is not None and options.get("own weights"):
            w13, w2, version, kind = rank.weights["w13"], rank.weights["w2"], rank.version, "plain"
            b13, b2 = rank.weights_of(version)[2:]
            if options.get("replicate") and state.choice == "balanced" and not state.masked and not biases:
                balance = "replicate"
        given: dict[str, Any] = {"x": one.x, "topk_idx": one.ids, "topk_weights": one.weights}
        loss = None
        if kind == "fp8":
            w13, w2, loss = fused.quantize_weights(w13), fused.quantize_weights(w2), 0.2
        if kind in ("fp8 channels", "int8 channels"):
            dtype = torch.float8_e4m3fn if kind[0] == "f" else torch.int8
            w13, w2, loss = fused.quantize_channels(w13, dtype), fused.quantize_channels(w2, dtype), 0.2
        if kind == "mxfp4":
            w13, w2, loss = _mxfp4(w13), _mxfp4(w2), 0.9
        if kind == "packed mxfp4":
            w13, w2, loss = fused.pack_mxfp4(_mxfp4(w13)), fused.pack_mxfp4(_mxfp4(w2)), 0.9
        if wire in ("fp8", "int8"):
            loss = (loss or 0) + 0.12
        given |= {"w13": w13, "w2": w2, "activation": activation, "wire": wire}
        if options.get("interleaved") and kind == "plain" and balance is None and not options.get("own weights"):
            given |= {"w13": fused.interleave(w13), "interleaved": True}
        if biases:
            given |= {"w13_bias": b13, "w2_bias": b2}
        if balance:
            given["balance"] = balance
        bias = torch.full((state.hidden,), 0.5).to(one.x.dtype) if options.get("bias") else None
        if bias is not None:
            given["bias"] = bias
        want = model.layer_of(one, round_.ids[here], version, state.dtype, activation, biases)
        want = want + 0.5 if bias is not None else want
        if twist == "bad id" and mine:
            Dispatch().twist(given := given | {"layout": "expert"}, twist, True, state, one)
            given.pop("layout")
        if mine and twist == "rows of another dtype":
            given["x"] = one.x.double()
        if mine and twist == "w13 of another shape":
            given["w13"] = torch.zeros(len(state.held[here]), 2 * INNER + 1, state.hidden, dtype=one.x.dtype)
            given["interleaved"] = False

        def check(out: Any) -> None:
            model.near(want, state.dtype, loss).check(f"layer of {kind} weights, balance {balance}, wire {wire}", out)

        return lambda: rank.buffer.moe(**given), check


def _mxfp4(w: torch.Tensor) -> Any:
    values, scales = formats.quantize(w.flatten(0, 1), "mxfp4")
    assert scales is not None
    shape = w.shape[:2]
    return fused.Mxfp4(values.view(*shape, -1), scales.view(torch.uint8).view(*shape, -1))


class Ops:
    """ops.dispatch, experts, ops.combine, and the gradients of both."""

    bad = ("rows of another dtype", "no layout", "a handle of other rows", "rows that are none")
    differ: ClassVar[Differing] = {
        "layout": ({"layout": "expert"}, {"layout": "batched"}),
        "layer": ({"layer": 1}, {"layer": 2}),
    }

    def prepare(self, rank: Rank, step: Step, twist: str = "", mine: bool = False) -> Prepared:
        """Return the call, and its check."""
        state, here, options = rank.state, rank.rank, dict(step.options)
        common, own = self.differ.get(twist, ({}, {}))
        options.update(common | (own if mine else {}))
        layout, wire = options.get("layout", "expert"), options.get("wire")
        if layout == "flat":
            layout = "expert"
        if wire in ("fp8", "int8") and state.hidden % 16:
            wire = None
        if wire == "rows" and state.several_domains:
            wire = None
        one, round_ = state.inputs(step, here), Round.of(state, step, chunks=True)
        if Dispatch.too_many_duplicates(round_) and (layout == "batched" or twist == "layout"):
            if twist == "layout":
                raise Skip
            layout = "expert"
        x = one.x.clone().requires_grad_()
        weights = one.used_weights.float().requires_grad_()
        g = torch.Generator().manual_seed(step.seed + here)
        grad = torch.randn(one.x.shape, generator=g).to(one.x.dtype)
        held = state.held[here]
        given: dict[str, Any] = {"layout": layout, "layer": options.get("layer", 0)}
        if options.get("quantize") and state.hidden % 32 == 0:
            given["quantize"] = "mxfp8"
        if mine and twist == "rows of another dtype":
            x = one.x.double()
        if mine and twist == "no layout":
            given["layout"] = "rows"
        if twist == "bad id" and mine:
            changed: dict[str, Any] = {"x": x, "topk_idx": one.ids, "topk_weights": weights, "layout": layout}
            Dispatch().twist(changed, twist, True, state, one)
            x, ids, weights = changed["x"], changed["topk_idx"], changed["topk_weights"]
        else:
            ids = one.ids

        def call() -> Any:
            sent = ops.dispatch(rank.buffer, x, ids, weights, **given)
            counts = sent.tokens_per_expert.tolist()
            scale = torch.zeros(sent.x.shape[:-1])
            at = 0
            for slot, count in enumerate(counts):
                part = scale[slot, :count] if layout == "batched" else scale[at : at + count]
                part.fill_(model.factor(held[slot]) if held[slot] >= 0 else 0)
                at += count
            y, handle = (sent.x * scale[..., None]).to(sent.x.dtype), sent.handle
            chunked = "max_rows" not in handle._fields
            if mine and twist == "a handle of other rows" and not chunked:
                handle = handle._replace(max_rows=handle.max_rows + 1)
            if mine and (twist == "rows that are none" or (twist == "a handle of other rows" and chunked)):
                y = "rows"  # type: ignore[assignment]
            out = ops.combine(y, handle, wire=wire)
            out.backward(grad)
            return sent, out

        def check(result: Any) -> None:
            sent, out = result
            if (groups := round_.groups(here)) is not None:
                counts, want = sent.tokens_per_expert.tolist(), [len(group) for group in groups]
                assert counts == want, f"ops.dispatch: rows by slot are {counts}, not {want}"
            quantized = "quantize" in given
            used = round_.sent[here].used_weights
            ids_here = round_.ids[here]
            want_out = model.sum_of(one, ids_here, used, wire, state.dtype)
            if quantized:
                size = model.sum_of(
                    replace(one, x=one.x.abs().amax(1, keepdim=True).expand_as(one.x)) if len(one.x) else one,
                    ids_here,
                    used,
                    wire,
                    state.dtype,
                )
                want_out.bound = want_out.bound + size.want.abs() / 15
            want_out.check("ops.combine", out)
            want_grad = model.sum_of(one, ids_here, used, None, state.dtype, rows=grad)
            want_grad.bound = want_grad.bound * 2  # rows are rounded as gradients of y, of rows, and as sums
            assert x.grad is not None
            want_grad.check("gradient of x", x.grad)
            if weights is not None:
                assert weights.grad is not None
                factors = torch.tensor(
                    [[model.factor(e) if e >= 0 else 0.0 for e in row] for row in ids_here.tolist()]
                ).reshape(ids_here.shape)
                dot = (one.x.double() * grad.double()).sum(dim=1)[:, None]
                size = (one.x.double() * grad.double()).abs().sum(dim=1)[:, None]
                loss = 4 * model.EPS[state.dtype] + 1e-5 + (0.15 if quantized else 0)
                bound = factors * (size * loss + 1e-5) + 1e-5
                model.Sum(factors * dot, bound.double()).check("gradient of topk_weights", weights.grad)

        return call, check


class OpsMoe:
    """ops.moe, and its gradients."""

    bad = ("rows of another dtype",)
    differ: ClassVar[Differing] = {"gradients wanted": ({}, {"no gradients": True})}

    def prepare(self, rank: Rank, step: Step, twist: str = "", mine: bool = False) -> Prepared:
        """Return the call, and its check."""
        state, here, options = rank.state, rank.rank, step.options
        round_ = Round.of(state, step, chunks=True)
        one = state.inputs(step, here)
        activation, biases = options.get("activation", "swiglu"), options.get("biases", False)
        x = one.x.clone().requires_grad_()
        weights = one.used_weights.float().requires_grad_()
        version, own = step.seed, False
        tensors = rank.weights_of(version)
        balance = None
        if rank.weights is not None and options.get("own weights") and not state.masked:
            own, version = True, rank.version
            tensors = [rank.weights["w13"], rank.weights["w2"], *rank.weights_of(version)[2:]]
            if options.get("replicate") and state.choice == "balanced" and not biases:
                balance = "replicate"
        params = [torch.nn.Parameter(t if own else t.clone()) for t in tensors[: 4 if biases else 2]]
        g = [torch.Generator().manual_seed(step.seed + r) for r in range(len(state.members))]
        grads = [
            torch.randn(state.inputs(step, r).x.shape, generator=g[r]).to(one.x.dtype)
            for r in range(len(state.members))
        ]
        given: dict[str, Any] = {"activation": activation, "balance": balance}
        if mine and twist == "rows of another dtype":
            x = one.x.double()
        if mine and twist == "gradients wanted":
            x, weights = one.x, one.weights
            params = [p.detach() for p in params]  # type: ignore[misc]

        def call() -> Any:
            extra = {"w13_bias": params[2], "w2_bias": params[3]} if biases else {}
            out = ops.moe(rank.buffer, x, one.ids, weights, params[0], params[1], **given, **extra)
            if out.requires_grad:
                out.backward(grads[here])
            return out

        def check(out: Any) -> None:
            experts = {
                e: tuple(
                    w.double().requires_grad_() for w in expert_weights(e, version, state.hidden, INNER, state.dtype)
                )
                for e in state.present()
            }
            loss = {"bfloat16": 0.06, "float16": 0.012, "float32": 2e-4}[state.dtype]
            for r in state.there:
                ours = round_.sent[r]
                x64 = ours.x.double().requires_grad_()
                w64 = ours.used_weights.clone().requires_grad_()
                want = model.layer_of(ours, round_.ids[r], version, state.dtype, activation, biases, experts, x64, w64)
                if want.requires_grad and want.numel():
                    want.backward(grads[r].double())
                if r != here:
                    continue
                model.near(want.detach(), state.dtype).check("ops.moe", out)
                zeros = torch.zeros_like
                model.near(x64.grad if x64.grad is not None else zeros(x64), state.dtype, loss).check(
                    "ops.moe: gradient of x", x.grad
                )
                grad = w64.grad if w64.grad is not None else zeros(w64)
                terms = grads[r].double().norm(dim=1, keepdim=True) * (1 + x64.detach().norm(dim=1, keepdim=True))
                model.Sum(grad, (loss * terms / 2 + 1e-5).expand_as(grad)).check(
                    "ops.moe: gradient of topk_weights", weights.grad
                )
            names = ("w13", "w2", "w13_bias", "w2_bias")
            if round_.slots is None or balance:  # several slots of an expert share its gradient in an open way
                return
            for nth, param in enumerate(params):
                total = torch.zeros(param.shape).double()
                for slot, expert in enumerate(state.held[here]):
                    if expert >= 0 and len(state.present().get(expert, [])) == 1:
                        grad = experts[expert][nth].grad
                        total[slot] = 0 if grad is None else grad
                single = torch.tensor([e < 0 or len(state.present().get(e, [])) == 1 for e in state.held[here]])
                got = torch.zeros_like(param) if param.grad is None else param.grad
                wide = total[single].flatten(1), got[single].flatten(1)
                model.near(wide[0], state.dtype, loss).check(f"ops.moe: gradient of {names[nth]}", wide[1])

        return call, check


ROUND_CALLS: dict[str, Any] = {
    "dispatch": Dispatch(),
    "combine": Combine(),
    "repeat": Repeat(),
    "moe": Moe(),
    "ops": Ops(),
    "ops moe": OpsMoe(),
}
__all__ = ["ROUND_CALLS", "Dispatch", "Kept", "Rank", "Skip", "check_arrived", "draw_placement"]
