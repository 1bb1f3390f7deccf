"""Calls that are no rounds: who takes part, which rank holds which expert, where weights lie, and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import moecomm
from moecomm import ops

from .calls import Skip, check_arrived
from .case import Step, draw_placement
from .expectations import expect
from .model import INNER, even

LEFT_OUT_S = 0.1  # for a rank that does not come

if TYPE_CHECKING:
    from .program import Program


def reopen(me: Program, step: Step) -> None:
    me.reopen()


def check_kept(me: Program, step: Step) -> None:
    if not me.inside:
        return
    for kept in me.kept:
        check_arrived(me, kept, me.rank)
    me.buffer.check()


def drop(me: Program, step: Step) -> None:
    """Let go of an output."""
    if me.kept:
        me.kept.pop(step.seed % len(me.kept))


def mask(me: Program, step: Step) -> None:
    """Mask a rank that lives."""
    state = me.state
    if len(state.there) < 2 or state.released:
        raise Skip
    rank = state.there[step.seed % len(state.there)]
    if me.inside:
        me.meet("mask")
        mine = rank == me.rank
        if mine:
            me.kept.clear()
            if me.executor.rounds_fail:
                expect(lambda: me.buffer.dispatch(*me.tokens(step)), moecomm.Excluded)
        else:
            masked = me.buffer.mask([rank])
            assert set(masked) == state.masked | {rank}, f"mask() returns {masked}"
    state.masked.add(rank)
    me.kept.clear()
    me.close_weights()
    if me.inside:
        me.check_state()


def unmask(me: Program, step: Step) -> None:
    """Take in a masked rank that lives, or replace one."""
    state = me.state
    alive = [r for r in sorted(state.masked) if state.members[r] not in state.gone]
    if not alive:
        raise Skip
    rank = alive[step.seed % len(alive)]
    if me.inside or (me.member in state.members and me.rank == rank):
        masked = me.buffer.unmask([rank])
        assert set(masked) == state.masked - {rank}, f"unmask() returns {masked}"
    state.masked.discard(rank)
    me.kept.clear()
    me.close_weights()
    if me.inside:
        me.check_state()


def shrink(me: Program, step: Step) -> None:
    """A rank leaves, or none."""
    state = me.state
    if state.released:
        raise Skip
    leaves = len(state.there) > 1 and step.options.get("leaves")
    victim = state.members[state.there[step.seed % len(state.there)]] if leaves else None
    if me.inside:
        me.meet("shrink")
        if me.member == victim:
            me.forget()
            me.buffer.close()
            me.buffer = None
    if victim is not None:
        state.gone.add(victim)
    me.go_on(step.then if step.then.startswith("shrink") else "shrink", set() if victim is None else {victim})


def grow(me: Program, step: Step) -> None:
    """Take in all ranks that live and are outside."""
    state = me.state
    outside = sorted(state.alive - set(state.members))
    if not outside or state.masked or state.released:
        raise Skip
    if state.several_domains and not state.known_domains:
        raise Skip  # the documentation leaves open which domains a Buffer has that has shrunk
    members = [*outside, *state.members] if step.seed % 2 else [*state.members, *outside]
    joins = me.member not in state.members
    me.executor.meet(f"{me.at} grow", members, me.member)
    state.open(members, step.seed)
    me.kept.clear()
    me.close_weights()
    if joins:
        me.open()
        return
    group = me.executor.group(f"open {state.opened}", members, me.member)
    me.buffer.grow(group, **({} if state.choice is None else {"placement": state.placement()}))
    me.check_state()


def release(me: Program, step: Step) -> None:
    """Release memory; outputs that are alive on one rank make it BadInput on all."""
    state = me.state
    if state.released:
        raise Skip
    if state.masked:
        if me.inside:
            expect(me.buffer.release_memory, moecomm.BadInput)
        return
    state.released = True
    if not me.inside:
        return
    me.close_weights()
    if me.kept:
        try:
            me.buffer.release_memory()
        except moecomm.BadInput:
            me.outcomes[me.at] = "BadInput"
        else:
            me.outcomes[me.at] = "released"  # rows of chunks lie elsewhere
            check_arrived(me, me.kept[-1], me.rank)
        me.kept.clear()
    me.buffer.release_memory()
    assert me.buffer.released


def restore(me: Program, step: Step) -> None:
    if not me.state.released:
        raise Skip
    if me.inside:
        me.buffer.restore()
    me.state.released = False


def place(me: Program, step: Step) -> None:
    """set_placement(); of another one on one rank: Mismatch in the next dispatch."""
    state = me.state
    if state.choice is None or state.released:
        raise Skip
    if not me.inside:
        if step.fault and len(state.there) > 1 and not state.masked:
            me.hear()
            me.reopen()
        return
    differs = bool(step.fault) and len(state.there) > 1 and not state.masked
    if differs:
        me.executor.tell(str(me.at), not state.lost)
    if state.lost:
        raise Skip
    if state.masked:
        expect(lambda: me.buffer.set_placement(state.placement()), moecomm.BadInput)
        return
    held = draw_placement(step.seed, len(state.members), state.num_experts, 0, state.slots)
    if differs:
        if me.rank == me.victim_of(step):
            held = [*held[1:], held[0]] if held[1:] + held[:1] != held else held
        placement = moecomm.Placement(held, num_experts=state.num_experts, slots=state.slots, choice=state.choice)
        me.buffer.set_placement(placement)
        same = draw_placement(step.seed, len(state.members), state.num_experts, 0, state.slots)
        if [*same[1:], same[0]] != same:
            expect(lambda: me.buffer.dispatch(*me.tokens(step)), moecomm.Mismatch)
        me.reopen()
        return
    me.close_weights()
    state.held = held
    me.buffer.set_placement(state.placement())
    me.check_state()


def weights(me: Program, step: Step) -> None:
    """Open ExpertWeights; with tensors in another order on one rank: Mismatch on all."""
    state = me.state
    if state.choice is None or state.lost or state.masked or state.released or not me.inside:
        raise Skip
    if me.weights is not None and not step.fault:
        raise Skip
    dtype = getattr(torch, state.dtype)
    shapes: dict[str, tuple[int, ...]] = {"w13": (2 * INNER, state.hidden), "w2": (state.hidden, INNER)}
    if step.fault and len(state.there) > 1:
        what, mine = step.fault[2], me.rank == me.victim_of(step)
        dtypes: Any = dtype
        if what == "order" and mine:
            shapes = {"w2": shapes["w2"], "w13": shapes["w13"]}
        if what == "shapes" and mine:
            shapes = {"w13": (INNER, 2 * state.hidden), "w2": shapes["w2"]}
        if what == "dtypes" and mine:
            dtypes = {torch.float32: torch.int32, torch.float16: torch.bfloat16}.get(dtype, torch.float16)
        expect(lambda: moecomm.ExpertWeights(me.buffer, shapes, dtype=dtypes), moecomm.Mismatch)
        return
    me.weights = moecomm.ExpertWeights(me.buffer, shapes, dtype=dtype)
    me.version = step.seed
    for slot, expert in enumerate(state.held[me.rank]):
        for name, values in zip(("w13", "w2"), me.tensors_of(expert, me.version), strict=False):
            me.weights[name][slot] = values if expert >= 0 else 0


def move(me: Program, step: Step) -> None:
    """Bring weights to another placement, with rounds between."""
    state = me.state
    if me.weights is None or not me.inside:
        raise Skip
    target = moecomm.Placement(
        draw_placement(step.seed, len(state.members), state.num_experts, 0, state.slots),
        num_experts=state.num_experts,
        slots=state.slots,
        choice=state.choice,  # type: ignore[arg-type]
    )
    for nth in range(3):
        following = me.weights.prefetch(target)
        if following == me.buffer.placement:
            break
        if step.options.get("rounds"):
            me.well(Step("dispatch", step.seed + nth), "")
        me.weights.commit()
        state.held = following.experts.tolist()
        me.check_state()
        for slot, expert in enumerate(state.held[me.rank]):
            if expert < 0:
                continue
            for name, want in zip(("w13", "w2"), me.tensors_of(expert, me.version), strict=False):
                assert torch.equal(me.weights[name][slot], want), (
                    f"{name} of slot {slot} is not that of expert {expert}"
                )


def slot_weights(me: Program, step: Step) -> None:
    """ops.slot_weights and its gradient."""
    state = me.state
    if state.choice is None or state.masked or state.released or not me.inside or state.several_domains:
        raise Skip
    owned = even(state.num_experts, len(state.members))
    own = [me.tensors_of(e, step.seed)[1] for e in owned[me.rank]]
    given = torch.stack(own).requires_grad_()
    if step.fault and len(state.there) > 1:
        mine, dtype = me.rank == me.victim_of(step), torch.int32 if given.element_size() == 4 else torch.int16
        if step.fault[2] == "dtypes":
            bad = given.detach().view(dtype) if mine else given.detach()
            expect(lambda: ops.slot_weights(me.buffer, [bad]), moecomm.Mismatch)
        else:
            bad = given.detach()[:-1] if mine else given.detach()
            expect(lambda: ops.slot_weights(me.buffer, [bad]), moecomm.BadInput)
        return
    try:
        (slots,) = ops.slot_weights(me.buffer, [given])
    except moecomm.BadInput:
        if not state.lost:
            raise
        me.outcomes[me.at] = "BadInput"
        return
    me.outcomes[me.at] = "slots"
    for slot, expert in enumerate(state.held[me.rank]):
        want = torch.zeros_like(own[0]) if expert < 0 else me.tensors_of(expert, step.seed)[1]
        assert torch.equal(slots[slot].detach(), want), f"slot {slot} has not the weights of expert {expert}"
    scale = torch.tensor([float(me.rank * state.slots + slot + 1) for slot in range(len(slots))]).to(slots.dtype)
    (slots * scale[:, None, None]).sum().backward()
    assert given.grad is not None
    for nth, expert in enumerate(owned[me.rank]):
        total = sum(slot + 1 for slot in state.present().get(expert, []))
        assert abs(float(given.grad[nth, 0, 0]) - total) <= total / 100, f"gradient of expert {expert}"


def stats(me: Program, step: Step) -> None:
    """Read counters; one rank may leave that out, or pass what is refused, and all go on."""
    if not me.inside or me.state.masked:
        return
    kind, _, _ = step.fault or ("", 0, "")
    if len(me.state.there) > 1 and kind == "bad one":
        reset: Any = "soon" if me.rank == me.victim_of(step) else False
        expect(lambda: me.buffer.stats(gather=True, reset=reset), moecomm.BadInput)
    if len(me.state.there) > 1 and kind == "left out":
        leave_out(me, step, lambda: me.buffer.stats(gather=True, reset=True))
    job = me.buffer.stats(gather=True)
    own = me.buffer.stats()
    assert int(job.rounds[me.rank]) == own.rounds, f"{own.rounds} rounds, not {job.rounds}"
    assert own.rounds >= len(me.kept), "a call that failed has reset the counters"


def leave_out(me: Program, step: Step, call: Callable[[], Any]) -> None:
    """Make an agreement that one rank leaves out: Timeout on the others, and nothing more."""
    rounds = me.buffer.rounds
    before = rounds.members
    if me.rank != me.victim_of(step):
        rounds.members = before._replace(timeout_s=LEFT_OUT_S)
        expect(call, moecomm.Timeout)
        rounds.members = before
    me.meet("left out")


CHANGES: dict[str, Callable[[Program, Step], None]] = {
    "reopen": reopen,
    "check kept": check_kept,
    "drop": drop,
    "mask": mask,
    "unmask": unmask,
    "shrink": shrink,
    "grow": grow,
    "release": release,
    "restore": restore,
    "place": place,
    "weights": weights,
    "move": move,
    "slot weights": slot_weights,
    "stats": stats,
}
