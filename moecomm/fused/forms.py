"""Choice between a fused and an unfused layer, for `fused=None`.

The first layer of a kind measures both forms, and all ranks take the same one.  Rank 0 keeps it in the user's tuning
table.  When a Buffer opens, the table of rank 0 says which forms are known.  Where nothing has been measured, bounds in
the tables decide (moecomm/gpu/tuning/layers.py).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

import moecomm
from moecomm.errors import BadInput, PeerLost, Timeout, TooManyRows, Unsupported
from moecomm.fused.weight_format import WeightFormat
from moecomm.gpu import tuning
from moecomm.gpu.tuning.layers import Form, Kind
from moecomm.gpu.tuning.measured import Call, Clock, fastest, in_ns, rounded_up, time_forms
from moecomm.membership.suspension import agreement
from moecomm.ranks import messages
from moecomm.ranks.opening import Opening
from moecomm.ranks.settings import Settings
from moecomm.rounds.rounds import Rounds

log = logging.getLogger("moecomm")

_WEIGHTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_NAMES = {True: "fused", False: "unfused"}
_TIMES = struct.Struct("<2q")  # nanoseconds of both forms
_HEAD_START = 4_000_000  # cycles: the host takes longer to enqueue an eager layer than an operator


class LayerForms(NamedTuple):
    """A rank's knowledge of layers, as ranks exchange it when a Buffer opens.

    Attributes:
        faster: values of faster(), in the order of its dtypes.
        known: kinds of layers that have been measured, and whether they run fused.
    """

    faster: list[bool]
    known: list[tuple[Kind, bool]]


def faster(gpu: str, settings: Settings) -> dict[torch.dtype, bool]:
    """Return for each dtype of weights whether bounds say that fused is faster, in a full Buffer of these sizes.

    Bounds are those of the user's table for the GPU, else of the shipped one.  Without bounds for the number of ranks,
    a layer runs unfused.
    """
    of_rank = settings.max_tokens * settings.topk
    of_expert = of_rank * settings.ranks / settings.held_by_all
    found = {}
    for dtype in _WEIGHTS:
        bounds = tuning.fused_from(gpu, tuning.name_of(dtype), settings.ranks)
        found[dtype] = bounds is not None and bounds.cover(of_expert, of_rank)
    return found


def agree(ranks: Opening, settings: Settings, device: torch.device) -> tuple[dict[torch.dtype, bool], dict[Kind, bool]]:
    """Return faster(), and the measured forms of this Buffer's layers, as rank 0 knows them.  Collective.

    Hosts may have different tables, and a layer that only some ranks fuse would time out.

    Raises:
        As Opening.all_gather.
    """
    if device.type == "cpu":  # layers of CPU ranks are never fused
        return {}, {}
    gpu = torch.cuda.get_device_name(device)
    mine = faster(gpu, settings)
    known = [(kind, fused) for kind, fused in tuning.measured_forms(gpu).items() if _is_of(kind, settings)]
    everybody = ranks.all_gather(messages.pack(LayerForms(list(mine.values()), known)))
    first = messages.unpack(everybody[0], LayerForms)
    return dict(zip(mine, first.faster, strict=True)), dict(first.known)


def kind_of(rounds: Rounds, weights: WeightFormat, values: torch.dtype, intermediate: int, tokens: int) -> Kind:
    """Return the kind of a layer: the same on all ranks, although their numbers of tokens may differ.

    `values`: dtype of the weights.  `tokens`: of this rank; they count only if it is the only one.
    """
    tokens = min(tokens, rounds.max_tokens) if rounds.num_ranks == 1 else rounds.max_tokens
    return Kind(
        **_of_buffer(rounds.settings),
        weights=_name(values) + (" by channel" if weights.casts else ""),
        intermediate=intermediate,
        tokens=rounded_up(max(1, tokens)),
    )


def _of_buffer(settings: Settings) -> dict[str, Any]:
    """Return the fields of a Kind that a Buffer decides."""
    return {
        "version": moecomm.__version__,
        "backend": settings.backend,
        "dtype": _name(settings.dtype),
        "ranks": settings.ranks,
        "experts": settings.held_by_all,
        "topk": settings.topk,
        "hidden": settings.hidden,
    }


def _is_of(kind: Kind, settings: Settings) -> bool:
    """Return whether layers of this kind run in a Buffer of these sizes."""
    return all(getattr(kind, name) == value for name, value in _of_buffer(settings).items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def can_measure(rounds: Rounds) -> bool:
    """Return whether a call may measure now: all ranks take part, and the host may wait.  The same on all ranks."""
    return not rounds.masked and not rounds.session.capturing()


def full_batch(rounds: Rounds, kind: Kind, even: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, ids and weights of this rank for a measurement.  torch's global generators are not used.

    Even routing of a power of two of tokens often fills the tiles of every expert to the last row, which no model does.

    `even`: all experts get the same number of rows, since each token takes the next K experts of a random permutation;
    otherwise each token takes K random experts.
    """
    tokens, device = min(kind.tokens, rounds.max_tokens), rounds.device
    placement, topk = rounds.placement, rounds.topk
    experts = rounds.num_experts if placement is None else placement.num_experts
    generator = torch.Generator(device).manual_seed(rounds.rank)
    about: dict[str, Any] = {"generator": generator, "device": device}
    if even:
        order = torch.randperm(experts, **about)
        ids = order[torch.arange(tokens * topk, device=device) % experts].view(tokens, topk)
    else:
        ids = torch.rand(tokens, experts, **about).topk(topk).indices
    x = torch.randn(tokens, rounds.hidden, **about, dtype=rounds.dtype)
    return x, ids, torch.full((tokens, topk), 1 / topk, device=device)


def measure(
    rounds: Rounds, kind: Kind, guess: bool, calls: Mapping[bool, Call], reserve: Callable[[bool], object]
) -> None:
    """Measure both forms of a kind of layer, and take the one whose slowest rank is faster from now on.  Collective.

    All ranks must have ended the same call.  Where the rows of random routing have no room, those of even routing are
    measured.  If a rank has no memory for a batch, or no room for even routing, all take the guess.

    Args:
        rounds: of the Buffer, whose `layer_forms` gets the form.
        kind: of the layer.
        guess: whether bounds say fused; taken if both forms take equally long.
        calls: a call of a full batch, by whether it runs fused.
        reserve: makes the batch, whose routing is even or not, and takes the memory of the call in both forms; raises
            if there is too little.

    Raises:
        PeerLost, Timeout, Aborted and others: as rounds.
    """
    forms = {_NAMES[fused]: calls[fused] for fused in (guess, not guess)}
    sampling, rounds.sampling = rounds.sampling, None  # rows of fused layers are not verified
    times = None
    try:
        _wait(rounds)
        for even in (False, True):
            if not all(map(any, _exchange(rounds, bytes([_has_room(partial(reserve, even))])))):
                break
            with suppress(TooManyRows):  # on every rank
                clock = Clock(rounds.device, _HEAD_START)
                times = time_forms(clock, forms, lambda call: call(), lambda _: _wait(rounds))
                break
    finally:
        rounds.sampling = sampling
    if times is None:
        rounds.layer_forms[kind] = guess
        return
    by_rank = _exchange(rounds, _TIMES.pack(*in_ns(tuple(forms), times)))
    form, us = fastest(tuple(forms), [_TIMES.unpack(data) for data in by_rank])
    rounds.layer_forms[kind] = form == _NAMES[True]
    log.info("rank %d: layers of %s run %s: %s", rounds.rank, kind, form, us)
    if rounds.rank == 0 and (rounds.on_cpu or rounds.session.exclusive_gpu):  # times on a shared GPU are not kept
        _keep(rounds.device, Form(kind._asdict(), form == _NAMES[True], us))


def _has_room(reserve: Callable[[], object]) -> bool:
    try:
        reserve()
    except (BadInput, Unsupported, torch.cuda.OutOfMemoryError):
        return False
    return True


def _wait(rounds: Rounds) -> None:
    """Wait for all rounds so far, which have deadlines, and raise their error."""
    rounds.wait()
    rounds.raise_failure()


def _exchange(rounds: Rounds, mine: bytes) -> list[bytes]:
    """Return the bytes of all ranks.  Collective."""
    try:
        with agreement(rounds, "moe") as ranks:
            everybody = ranks.all_gather(mine)
            ranks.settle()
    except (PeerLost, Timeout):
        rounds.raise_failure()  # masks the lost ranks if on_timeout="mask"
        raise
    return everybody


def _keep(device: torch.device, form: Form) -> None:
    """Write a form to this user's table.  If that fails, only this Buffer has the form."""
    try:
        tuning.keep_form(torch.cuda.get_device_name(device), form)
    except (OSError, ValueError) as error:
        log.info("the form of a layer is not kept: %s", error)
