"""Layers that train over a placement: the weights of one process, bit for bit, whatever the replicas."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import moecomm
from moecomm import Placement, ops
from moecomm.base.experts import experts_of
from moecomm.combine.reference import combine
from moecomm.dispatch.reference import dispatch
from moecomm.nn import ExpertParallel, clip_grad_norm_, expert_parameters, gather_state
from moecomm.router import random_routing
from moecomm.testing.cases import random_placement
from moecomm.weights import slots
from tests.backends.conftest import run_ranks
from tests.few import few
from tests.live import FAR_S, ROOM_S, wait_until

from ..backends.conftest import all_ranks

RANKS, HIDDEN, INNER, EXPERTS, SLOTS, TOPK, MOST, STEPS = 3, 16, 8, 7, 5, 3, 12, 4
TOKENS = (7, 0, 12)
SIZES: dict[str, Any] = {
    "hidden": HIDDEN,
    "intermediate": INNER,
    "num_experts": EXPERTS,
    "topk": TOPK,
    "max_tokens": MOST,
    "backend": "host",
    "device": "cpu",
}
EMPTY_RANK = Placement([[0, 2, 4, 2, 6], [], [1, 3, 5, 2, 0]], slots=SLOTS, choice="token")
IN_A_ROW = Placement([[0, 1, 2], [3, 4], [5, 6]], slots=SLOTS)


def drawn(seed: int) -> Placement:
    return random_placement(seed, ranks=RANKS, num_experts=EXPERTS, slots=SLOTS)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(step: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Tokens, ids and weights of each rank: with -1, and experts that a token picks twice."""
    g = generator(step)
    routing = [random_routing(t, EXPERTS, TOPK, drop=0.2, duplicates=True, generator=g) for t in TOKENS]
    xs = [torch.randn(tokens, HIDDEN, generator=g) for tokens in TOKENS]
    return xs, [ids for ids, _ in routing], [weights for _, weights in routing]


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out - 1).square().sum()


def reference(
    w13: torch.Tensor, w2: torch.Tensor, step: int, placement: Placement
) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Return the losses of all ranks, and the gradients of all experts: those of their slots, added in order."""
    xs, ids, weights = inputs(step)
    chosen = [placement.slots_of(one, rank) for rank, one in enumerate(ids)]
    arrived = dispatch(xs, chosen, list(weights), num_experts=RANKS * SLOTS)
    held, kept, ys = placement.experts.tolist(), [], []

    def by_slot(rank: int, multiply: Callable[..., torch.Tensor], *rows: torch.Tensor) -> list[torch.Tensor]:
        counts = arrived[rank].tokens_per_expert.tolist()
        parts = zip(*(one.split(counts) for one in rows), held[rank], strict=True)
        return [multiply(*part) for part in parts]

    for rank, here in enumerate(arrived):
        both = torch.cat(by_slot(rank, lambda rows, expert: rows @ w13[expert].T, here.x)).requires_grad_()
        gate, up = both.chunk(2, dim=-1)
        inner = silu(gate) * up
        ys.append(torch.cat(by_slot(rank, lambda rows, expert: rows @ w2[expert].T, inner.detach())))
        kept.append((both, inner))
    outs = [out.requires_grad_() for out in combine(ys, arrived)]
    losses = [loss_of(out) for out in outs]
    grads = [torch.autograd.grad(loss, out)[0] for loss, out in zip(losses, outs, strict=True)]
    sums: list[list[torch.Tensor]] = [[torch.zeros_like(w13[0]), torch.zeros_like(w2[0])] for _ in range(EXPERTS)]
    seen: set[int] = set()
    for rank, (here, (both, inner)) in enumerate(zip(arrived, kept, strict=True)):
        of_tokens = torch.cat([grads[source][token : token + 1] for source, token in here.src.tolist()] or [here.x])
        grad_y = of_tokens * here.row_weights[:, None]
        grad_inner = torch.cat(by_slot(rank, lambda rows, expert: rows @ w2[expert], grad_y))
        (grad_both,) = torch.autograd.grad(inner, both, grad_inner)
        of_w13 = by_slot(rank, lambda left, right, _: left.T @ right, grad_both, here.x)
        of_w2 = by_slot(rank, lambda left, right, _: left.T @ right, grad_y, inner.detach())
        for slot, expert in enumerate(held[rank]):
            if expert >= 0:
                terms = (of_w13[slot], of_w2[slot])
                sums[expert] = [a + b for a, b in zip(sums[expert], terms, strict=True)] if expert in seen else [*terms]
                seen.add(expert)
    found = [torch.stack(one) for one in zip(*sums, strict=True)]
    return [float(loss.detach()) for loss in losses], found[0], found[1]


CHANGES = [(EMPTY_RANK, IN_A_ROW), *((drawn(seed), drawn(seed + 50)) for seed in range(12))]


@pytest.mark.parametrize("case", few(range(len(CHANGES)), 0, 1, 2))
def test_steps_have_the_bits_of_one_process(case: int) -> None:
    """With replicas, empty slots, a rank without experts, and another placement from the middle on."""
    placements = CHANGES[case]

    def body(group: Any) -> tuple[list[float], list[torch.Tensor]]:
        layer = ExpertParallel(group, **SIZES, gate=None, placement=placements[0])
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.02, momentum=0.9)
        losses = []
        for step in range(STEPS):
            if step == STEPS // 2:
                layer.open().set_placement(placements[1])
            xs, ids, weights = (one[group.rank] for one in inputs(step))
            loss = loss_of(layer(xs, ids, weights))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        held = [param.numel() for state in optimizer.state.values() for param in [state["momentum_buffer"]]]
        assert held == [param.numel() for param in layer.parameters()], "replicas have no state"
        layer.open().close()
        return losses, [param.detach() for param in layer.parameters()]

    found = all_ranks(RANKS, body)
    whole = ExpertParallel("self", **SIZES, gate=None)
    w13, w2 = whole.experts.w13, whole.experts.w2
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.02, momentum=0.9)
    for step in range(STEPS):
        losses, w13.grad, w2.grad = reference(w13.detach(), w2.detach(), step, placements[step >= STEPS // 2])
        assert losses == [of_rank[step] for of_rank, _ in found]
        optimizer.step()
    for rank, (_, (mine13, mine2)) in enumerate(found):
        mine = experts_of(rank, EXPERTS, RANKS)
        assert torch.equal(mine13, w13[mine.start : mine.stop]) and torch.equal(mine2, w2[mine.start : mine.stop])


def test_gradients_are_those_of_the_formula() -> None:
    """Gradients of x, the routing weights, weights and biases; a pass without gradients has the same outputs."""
    whole = ExpertParallel("self", **SIZES, gate=None, bias=True).double()
    xs, ids, weights = inputs(0)
    biases = [torch.randn(param.shape, generator=generator(7)) for param in list(whole.experts.parameters())[2:]]

    def body(group: Any) -> list[torch.Tensor]:
        layer = ExpertParallel(group, **SIZES, gate=None, bias=True, placement=drawn(3))
        mine = experts_of(group.rank, EXPERTS, RANKS)
        with torch.no_grad():
            for param, bias in zip(list(layer.parameters())[2:], biases, strict=True):
                param.copy_(bias[mine.start : mine.stop])
        x, w = xs[group.rank].clone().requires_grad_(), weights[group.rank].clone().requires_grad_()
        out = layer(x, ids[group.rank], w)
        loss_of(out).backward()
        with torch.no_grad():
            torch.testing.assert_close(layer(x, ids[group.rank], w), out, rtol=1e-5, atol=1e-5)
        layer.open().close()
        return [out.detach(), x.grad, w.grad, *(param.grad.as_subclass(torch.Tensor) for param in layer.parameters())]

    found = all_ranks(RANKS, body)
    x, w = (torch.cat(one).double().requires_grad_() for one in (xs, weights))
    w13, w2, w13_bias, w2_bias = parameters = list(whole.experts.parameters())
    with torch.no_grad():
        w13_bias.copy_(biases[0]), w2_bias.copy_(biases[1])
    idx = torch.cat(ids)
    both = torch.einsum("th,eih->tei", x, w13) + w13_bias
    gate, up = both.chunk(2, dim=-1)
    y = torch.einsum("tei,ehi->teh", silu(gate) * up, w2) + w2_bias
    chosen = y.gather(1, idx.clamp(min=0).unsqueeze(2).expand(-1, -1, HIDDEN))
    out = (chosen * torch.where(idx >= 0, w, 0.0).unsqueeze(2)).sum(dim=1)
    loss_of(out).backward()
    for nth, want in enumerate([out, x.grad, w.grad, *(param.grad for param in parameters)]):
        got = torch.cat([of_rank[nth] for of_rank in found])
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_slots_are_copies_and_gradients_are_added_in_the_order_of_slots(dtype: torch.dtype) -> None:
    """In float32 or wider, rounded once.  The order is that of the placement in the forward pass."""
    placement, g = EMPTY_RANK, generator(0)
    whole = [torch.randn(EXPERTS, 3, 5, generator=g).to(dtype), torch.randn(EXPERTS, generator=g).to(dtype)]
    grads = [torch.randn(RANKS * SLOTS, *one.shape[1:], generator=g).to(dtype) for one in whole]

    def body(group: Any) -> list[torch.Tensor]:
        mine, here = (experts_of(group.rank, number, RANKS) for number in (EXPERTS, RANKS * SLOTS))
        sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}
        with moecomm.Buffer(group, **sizes, placement=placement) as buffer:
            owned = [one[mine.start : mine.stop].clone().requires_grad_() for one in whole]
            copies = ops.slot_weights(buffer, owned)
            again = ops.slot_weights(buffer.name, [one.detach() for one in owned])
            for copied, second, one in zip(copies, again, whole, strict=True):
                assert torch.equal(copied, second) and not second.requires_grad
                for slot, expert in enumerate(buffer.local_experts):
                    assert torch.equal(copied[slot], one[expert] if expert >= 0 else torch.zeros_like(one[0]))
            buffer.set_placement(IN_A_ROW)
            torch.autograd.backward(copies, [one[here.start : here.stop] for one in grads])
            return [one.grad for one in owned]

    found = all_ranks(RANKS, body)
    wide = torch.promote_types(dtype, torch.float32)
    for nth, one in enumerate(grads):
        got = torch.cat([of_rank[nth] for of_rank in found])
        for expert, (first, *others) in enumerate(placement.slots_by_expert):
            total = one[first].to(wide)
            for slot in others:
                total = total + one[slot]
            assert torch.equal(got[expert], total.to(dtype)), f"expert {expert}"


@pytest.mark.parametrize("how", ["checkpointed", "ops.moe"])
def test_other_routes_give_what_a_plain_pass_gives(how: str) -> None:
    """Activation checkpointing, which copies weights twice; and ops.moe over slots."""

    def body(group: Any) -> None:
        layer = ExpertParallel(group, **SIZES, gate=None, placement=drawn(5))
        x, ids, weights = (one[group.rank] for one in inputs(1))
        found = []
        for route in ("layer", how):
            layer.zero_grad()
            x = x.detach().requires_grad_()
            if route == "layer":
                out = layer(x, ids, weights)
            elif route == "checkpointed":
                out = checkpoint(layer, x, ids, weights, use_reentrant=False)
            else:
                out = ops.moe(layer.open(), x, ids, weights, *ops.slot_weights(layer.open(), list(layer.parameters())))
            loss_of(out).backward()
            grads = [param.grad.as_subclass(torch.Tensor) for param in layer.parameters()]
            found.append([out.detach(), x.grad, *grads])
        bound = 1e-4 if how == "ops.moe" else 0.0
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=bound, atol=bound)
        layer.open().close()

    all_ranks(RANKS, body)


def test_a_compiled_layer_is_one_graph_and_follows_placements() -> None:
    first, second = ([[0, 3, -1, 1, 2, 2, 4, 5, 6]], [[6, 6, 6, 5, 4, 3, 2, 1, 0]])
    layer = ExpertParallel("self", **SIZES, gate=None, placement=Placement(first), max_rows=MOST * TOPK)
    buffer = layer.open()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for placement in (first, second):
        buffer.set_placement(Placement(placement))
        results = []
        for call in (layer, compiled):
            layer.zero_grad()
            x, ids, weights = (one[2] for one in inputs(2))
            out = call(x, ids, weights)
            loss_of(out).backward()
            results.append([out.detach(), *(param.grad.clone() for param in layer.parameters())])
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)
    with torch.no_grad():
        assert torch.equal(compiled(x, ids, weights), layer(x, ids, weights))
    torch.compiler.reset()


def test_what_torch_checks_of_any_operator() -> None:
    sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}
    placement = Placement([[0, 3, -1, 1, 2, 2, 4, 5, 6]])
    with moecomm.Buffer("self", **sizes, placement=placement) as buffer:
        owned = [torch.randn(EXPERTS, 3, generator=generator(0)).requires_grad_(), torch.ones(EXPERTS)]
        torch.library.opcheck(slots.slot_weights, (owned, buffer.name))
        grads = [torch.ones(9, 3), torch.ones(9)]
        torch.library.opcheck(slots.slot_gradients, (grads, placement.experts, buffer.name))


class Model(torch.nn.Module):
    """A dense layer, and experts behind a gate."""

    def __init__(self, group: Any, placement: Placement | None = None) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(HIDDEN, HIDDEN)
        for param in self.dense.parameters():
            param.data.copy_(torch.randn(param.shape, generator=generator(3)) / 4)
        self.layer = ExpertParallel(group, **{**SIZES, "max_tokens": 4 * MOST}, placement=placement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.dense(x))


PLACEMENTS = {4: random_placement(1, ranks=4, num_experts=EXPERTS, slots=4), 2: Placement([[6, 5, 0, 1], [1, 2, 3, 4]])}


def _steps(model: torch.nn.Module, x: torch.Tensor, clip: Callable[..., Any], optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        (model(x) - 1).square().mean().backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)


def _trains_on(rank: int, group: Any, placed: bool, load: str, save: str) -> dict[str, list[Any]]:
    """Load a checkpoint if there is one, make two steps, and save another; return the weights of all experts."""
    model = Model(group, PLACEMENTS[group.size()] if placed else None)
    replicated = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = _optimizer(model)
    if load:
        weights, moments = states.get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=load)
        states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    x = torch.cat(tokens()).chunk(group.size())[rank]
    _steps(replicated, x, lambda one: clip_grad_norm_(one, 0.5), optimizer)
    weights, moments = states.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=save)
    assert len(expert_parameters(model)) == 2
    return {name: value.tolist() for name, value in gather_state(model.state_dict(), group).items()}


def tokens() -> list[torch.Tensor]:
    return [torch.randn(6, HIDDEN, generator=generator(30 + nth)) for nth in range(4)]


def test_training_goes_on_under_other_placements_and_numbers_of_ranks(ranks: Any, tmp_path: Path) -> None:
    """A gate, DDP, clipping, and checkpoints of weights and moments: without a placement, on 4 ranks, and on 2."""
    one = Model("self")
    optimizer, last = _optimizer(one), ""
    for number, placed in ((2, False), (4, True), (2, True), (4, False)):
        save = str(tmp_path / f"{number} {placed}")
        _steps(one, torch.cat(tokens()), lambda one: torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5), optimizer)
        for found in ranks.run(number, _trains_on, placed, last, save):
            for name, value in one.state_dict().items():
                torch.testing.assert_close(torch.tensor(found[name]), value, rtol=1e-4, atol=1e-5)
        last = save


def test_what_cannot_be_placed() -> None:
    sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}
    whole = Placement([range(EXPERTS)])
    with moecomm.Buffer("self", **sizes) as buffer, pytest.raises(moecomm.BadInput, match="without a placement"):
        ops.slot_weights(buffer, [torch.zeros(EXPERTS)])
    with moecomm.Buffer("self", **sizes, dtype=torch.float32, placement=whole) as buffer:
        for weights in ([], torch.zeros(EXPERTS), [torch.zeros(EXPERTS + 1)], [torch.zeros(())], [None]):
            with pytest.raises(moecomm.BadInput, match="weights"):
                ops.slot_weights(buffer, weights)  # type: ignore[arg-type]
        with pytest.raises(moecomm.BadInput, match="placement: got one beside a buffer"):
            ExpertParallel(**SIZES, buffer=buffer, placement=whole)
        layer = ExpertParallel(**SIZES, buffer=buffer)
        assert layer.open() is buffer
        layer.experts.w2.requires_grad_(False)
        layer(torch.ones(2, HIDDEN)).sum().backward()
        assert layer.experts.w2.grad is None and layer.experts.w13.grad is not None
        owned = torch.ones(EXPERTS, requires_grad=True)
        (grad,) = torch.autograd.grad(ops.slot_weights(buffer, [owned])[0].square().sum(), owned, create_graph=True)
        with pytest.raises(moecomm.Unsupported, match="differentiated again"):
            grad.sum().backward()
    for placement in (Placement([[0, 1]]), Placement([range(EXPERTS)] * 2)):
        with pytest.raises(moecomm.BadInput, match="placement"):
            ExpertParallel("self", **SIZES, placement=placement).open()
    with pytest.raises(moecomm.BadInput, match="placement"):
        ExpertParallel("self", **SIZES, placement=[[0]])  # type: ignore[arg-type]


def test_ranks_with_other_weights_or_other_ranks() -> None:
    """A mismatch by name; masked ranks, whose experts nobody has; and a Buffer that has lost a rank."""

    def body(group: Any) -> None:
        sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}
        x, (ids, weights) = inputs(0)[0][group.rank], (one[group.rank] for one in inputs(0)[1:])
        with moecomm.Buffer(group, **sizes, dtype=torch.float32, placement=drawn(8)) as buffer:
            layer = ExpertParallel(**SIZES, buffer=buffer)
            mine = experts_of(group.rank, EXPERTS, RANKS)
            with pytest.raises(moecomm.Mismatch, match="weights"):
                ops.slot_weights(buffer, [torch.zeros(len(mine), 2, 1 + group.rank % 2)])
            want = layer(x, ids, weights)
            if group.rank != 2:
                buffer.mask([2])
                with pytest.raises(moecomm.Unsupported, match="masked ranks"):
                    layer.experts(x, torch.zeros(SLOTS, dtype=torch.int32), buffer)
            buffer.unmask([2])
            assert torch.equal(layer(x, ids, weights), want)
            buffer.shrink()  # without a loss
            assert torch.equal(layer(x, ids, weights), want)
            if group.rank != 2:
                with pytest.raises(moecomm.PeerLost):
                    layer(x, ids, weights)
                buffer.shrink()
                with pytest.raises(moecomm.BadInput, match="got one of 2 ranks; want one of 3"):
                    layer(x, ids, weights)

    for error in run_ranks(RANKS, body):
        assert error is None


def _weights(group: Any, kind: str) -> Any:
    """Weights of the experts of a rank that can be used, and of kinds that rank 1 refuses or no other rank has."""
    mine = experts_of(group.rank, EXPERTS, RANKS)
    good = float(mine.start) + torch.arange(len(mine))
    bad: dict[str, Any] = {
        "of another number": [torch.zeros(len(mine) + 1)],
        "no list": good,
        "no tensor": [None],
        "of another dtype": [good.double()],
        "of another shape": [good[:, None]],
    }
    return [good] if kind == "good" else bad[kind]


def test_weights_of_the_ranks_that_are_left_after_a_loss() -> None:
    """A rank may own more experts than it has slots: 4 of 8, in 3 slots.  Lost experts have an owner, and no slot."""
    groups, sizes = moecomm.local_ranks(2), {"hidden": HIDDEN, "num_experts": 8, "topk": 1, "max_tokens": 4}
    placement = Placement([[3, 4, 1], [5, 7, 2], [6, 5, 0]], num_experts=8, choice="token")

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **sizes, backend="host", timeout_s=20, placement=placement) as buffer:
            if group.rank == 0:
                return
            buffer.shrink(groups[group.rank - 1])
            first = 4 * buffer.rank
            owned = torch.arange(first, first + 4.0)[:, None].repeat(1, 5).requires_grad_()
            (slots,) = ops.slot_weights(buffer, [owned])
            assert slots[:, 0].tolist() == list(placement.held[group.rank]) == list(buffer.local_experts)
            slots.sum().backward()
            replicas = [sum(one.count(expert) for one in placement.held[1:]) for expert in range(first, first + 4)]
            assert owned.grad is not None and owned.grad[:, 0].tolist() == replicas
            with pytest.raises(moecomm.BadInput, match=f"experts {first} to {first + 3}, which this rank owns"):
                ops.slot_weights(buffer, [torch.zeros(3, 5)])

    all_ranks(3, body)


def test_fewer_experts_than_ranks_have_owners() -> None:
    placement = Placement([[0], [1], [0, 1]])

    def body(group: Any) -> None:
        sizes = {"hidden": HIDDEN, "num_experts": 2, "topk": 1, "max_tokens": 4}
        with moecomm.Buffer(group, **sizes, backend="host", timeout_s=20, placement=placement) as buffer:
            owned = torch.full((int(group.rank < 2), 3), float(group.rank), requires_grad=True)
            (slots,) = ops.slot_weights(buffer, [owned])
            assert slots[:, 0].tolist() == [max(expert, 0) for expert in placement.held[group.rank]]
            slots.sum().backward()
            assert owned.grad is not None and torch.equal(owned.grad, torch.full_like(owned, 2))

    all_ranks(3, body)


@pytest.mark.parametrize("opened", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("kind", ["of another number", "no list", "no tensor", "of another dtype", "of another shape"])
def test_weights_that_one_rank_cannot_use_raise_on_all(kind: str, opened: bool) -> None:
    """In this call, whether or not the ranks have opened a Window before; the next call is right."""
    sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}
    differs = kind in ("of another dtype", "of another shape")

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **sizes, placement=IN_A_ROW, timeout_s=FAR_S) as buffer:
            good = _weights(group, "good")
            if opened:
                ops.slot_weights(buffer, good)
            error, argument = (moecomm.Mismatch, "field") if differs else (moecomm.BadInput, "argument")
            with pytest.raises(error) as raised:
                ops.slot_weights(buffer, _weights(group, kind) if group.rank == 1 else good)
            assert getattr(raised.value, argument) == "weights"
            other = (0 if differs else None) if group.rank == 1 else 1
            assert raised.value.rank == other
            for _ in range(2):
                (copies,) = ops.slot_weights(buffer, good)
                held = torch.tensor(buffer.local_experts)
                assert torch.equal(copies, held.clamp(min=0).float())

    started = time.monotonic()
    assert run_ranks(RANKS, body) == [None] * RANKS
    assert time.monotonic() - started < ROOM_S


def test_weights_of_several_shapes_that_ranks_pass_in_another_order() -> None:
    """No rank reads the weights of another shape, of which a Window is open as well."""
    sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}

    def body(group: Any) -> None:
        mine = experts_of(group.rank, EXPERTS, RANKS)
        narrow, wide = ([torch.ones(len(mine), columns)] for columns in (2, 3))
        with moecomm.Buffer(group, **sizes, placement=IN_A_ROW, timeout_s=FAR_S) as buffer:
            for weights in (narrow, wide, narrow):
                ops.slot_weights(buffer, weights)
            with pytest.raises(moecomm.Mismatch, match=r"'E/R', 2.*'E/R', 3|'E/R', 3.*'E/R', 2"):
                ops.slot_weights(buffer, wide if group.rank == 1 else narrow)
            ops.slot_weights(buffer, wide)

    assert run_ranks(RANKS, body) == [None] * RANKS


def test_gpus_raise_the_error_of_another_rank_when_their_streams_have_come_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No exchange waits for its stream; an exchange that finds the error ends first, so that no rank waits for it."""
    sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}
    empty, on = torch.empty, threading.local()

    class Event:
        """A mark on the stream of a rank, a thread, which comes to it when `on.comes` is set."""

        def query(self) -> bool:
            return bool(on.comes)

        def synchronize(self) -> None:
            on.comes = True

        def record(self, stream: object) -> None:
            pass

    class Stream:
        def wait_event(self, event: Event) -> None:
            pass

        def record_event(self) -> Event:
            return Event()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **how: empty(*sizes, **how))

    def body(group: Any) -> None:
        mine, on.comes = experts_of(group.rank, EXPERTS, RANKS), False
        good = [torch.arange(mine.start, mine.stop).float()]
        with moecomm.Buffer(group, **sizes, placement=IN_A_ROW, timeout_s=FAR_S) as buffer:
            ops.slot_weights(buffer, good)
            buffer.rounds.part(slots.Exchanges)._done = Event()
            for bad, error in (([torch.zeros(9)], moecomm.BadInput), ([good[0].double()], moecomm.Mismatch)):
                for on.comes in (False, True):
                    with pytest.raises(error) if on.comes or group.rank == 1 else nullcontext():
                        ops.slot_weights(buffer, bad if group.rank == 1 else good)
                    (copies,) = ops.slot_weights(buffer, good)
                    assert torch.equal(copies, torch.tensor(buffer.local_experts).clamp(min=0).float())
                    if not on.comes and group.rank != 1:
                        with pytest.raises(error, match="rank 1"):
                            buffer.check()
                    buffer.check()

    assert run_ranks(RANKS, body) == [None] * RANKS


def test_a_released_buffer_has_no_memory_for_weights() -> None:
    """release_memory() gives the Windows back, and weights copied after restore() are right.

    A rank whose weights can't be used joins nothing while the others raise MemoryReleased.
    """
    sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **sizes, placement=IN_A_ROW, timeout_s=FAR_S) as buffer:
            good = [torch.ones(len(experts_of(group.rank, EXPERTS, RANKS)), 1 << 16)]
            before = ops.slot_weights(buffer, good)
            memory = [weakref.ref(one.window._opened) for one in buffer.rounds.part(slots.Exchanges).by_kinds.values()]
            buffer.release_memory()
            assert [one() for one in memory] == [None]
            with pytest.raises(moecomm.MemoryReleased):
                ops.slot_weights(buffer, _weights(group, "of another number") if group.rank == 1 else good)
            buffer.restore()
            for one, other in zip(before, ops.slot_weights(buffer, good), strict=True):
                assert torch.equal(one, other)

    assert run_ranks(RANKS, body) == [None] * RANKS


@pytest.mark.parametrize("then", ["release_memory", "mask"])
def test_check_raises_the_timeout_of_an_exchange(then: str) -> None:
    """Rank 1 does not come.  All raise in check() and release_memory(), unless the others mask rank 1."""
    sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}
    ended = threading.Barrier(RANKS)

    def body(group: Any) -> None:
        with moecomm.Buffer(group, **sizes, placement=IN_A_ROW, timeout_s=1) as buffer:
            good = _weights(group, "good")
            ops.slot_weights(buffer, good)
            if group.rank != 1:
                with pytest.raises(moecomm.Timeout):
                    ops.slot_weights(buffer, good)
            ended.wait(ROOM_S)
            with pytest.raises(moecomm.Timeout):
                buffer.check()
            if then == "release_memory":
                with pytest.raises(moecomm.Timeout):
                    buffer.release_memory()
                assert not buffer.released
            elif group.rank != 1:
                buffer.mask([1])
                buffer.check()
            ended.wait(ROOM_S)

    assert run_ranks(RANKS, body) == [None] * RANKS


@pytest.mark.parametrize("end", ["abort", "close"])
def test_an_exchange_ends_with_the_buffer(end: str) -> None:
    """Rank 1 aborts or closes while the others wait in an exchange."""
    sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}

    def body(group: Any) -> tuple[str, float]:
        mine = experts_of(group.rank, EXPERTS, RANKS)
        buffer = moecomm.Buffer(group, **sizes, placement=IN_A_ROW, timeout_s=60)
        ops.slot_weights(buffer, [torch.zeros(len(mine))])
        if group.rank == 1:
            time.sleep(0.3)
            getattr(buffer, end)()
            return "", 0.0
        started = time.monotonic()
        with pytest.raises(moecomm.MoecommError) as raised:
            ops.slot_weights(buffer, [torch.zeros(len(mine))])
        return type(raised.value).__name__, time.monotonic() - started

    found = run_ranks(RANKS, body)
    error = {"abort": "Aborted", "close": "PeerLost"}[end]
    assert [name for name, _ in found] == [error, "", error]
    assert all(seconds < ROOM_S for _, seconds in found)


def _exchange_until_a_rank_is_gone(rank: int, group: Any, seed: int, opened: str) -> str:
    """Return the error's name.  Whatever an exchange returns is right: small integers, whose sums are exact."""
    sizes = {name: SIZES[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "backend")}
    mine, here = (experts_of(rank, number, RANKS) for number in (EXPERTS, RANKS * SLOTS))
    buffer = moecomm.Buffer(group, **sizes, placement=drawn(seed), timeout_s=20)
    Path(f"{opened}{rank}").touch()
    try:
        for step in range(1_000_000):
            placement = drawn(seed + step // 3)
            if step % 3 == 0:
                buffer.set_placement(placement)
            owned = (100.0 * step + torch.arange(EXPERTS)[mine.start : mine.stop]).requires_grad_()
            (copies,) = ops.slot_weights(buffer, [owned])
            held = torch.tensor(buffer.local_experts)
            assert torch.equal(copies, torch.where(held >= 0, 100.0 * step + held, 0.0))
            copies.backward(step + torch.arange(here.start, here.stop).float())
            want = [sum(step + slot for slot in placement.slots_by_expert[expert]) for expert in mine]
            assert owned.grad.tolist() == want
    except moecomm.MoecommError as error:
        return type(error).__name__
    return "none"


@pytest.mark.parametrize("seed", few(range(10), 0))
def test_a_rank_that_dies_ends_the_exchange_of_all(seed: int, ranks: Any, tmp_path: Path) -> None:
    """Between or amid exchanges, their opening and changes of the placement; nothing that is wrong is returned."""
    ranks.start(RANKS, _exchange_until_a_rank_is_gone, seed, str(tmp_path / "opened"))
    wait_until(lambda: len(list(tmp_path.glob("opened*"))) == RANKS, 60)
    time.sleep(random.Random(seed).random() / 2)
    ranks.kill(seed % RANKS)
    found = ranks.results(RANKS - 1, timeout_s=15)
    assert set(found.values()) == {"PeerLost"}
