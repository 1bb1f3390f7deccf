"""The backends by name: which can run here, and the session of the first that reaches all ranks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from moecomm import _native
from moecomm.base.choices import BackendName
from moecomm.errors import BadInput, Unsupported
from moecomm.ranks.collective import NoRoom, all_or_none
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.peers import Peers
from moecomm.ranks.session import Backend, Session

_ON_GPUS = ("lsa", "gin", "nvshmem")  # in the order that "auto" prefers
NAMES = (*_ON_GPUS, "host")
_ASKED_FOR = "asked for"
_T = TypeVar("_T")


@functools.cache
def load(name: str) -> Backend:
    """Return the backend of that name."""
    if name not in NAMES:
        raise BadInput("backend", repr(name), f"auto, {', '.join(NAMES)}")
    return importlib.import_module(f"moecomm.backends.{name}")


def missing(name: str) -> str:
    """Return "" if the backend of that name can run here; else the first thing missing, as a sentence."""
    return load(name).missing()


def choose(name: str, device: torch.device | None) -> tuple[BackendName, str]:
    """Return the backend for `name` ("auto" or one of NAMES) and why.

    A device decides for "auto": CPU tensors travel over `host`, CUDA tensors over the first GPU backend that can run.

    Raises:
        Unsupported: a backend asked for by name can't run here.
    """
    if name != "auto":
        if reason := missing(name):
            raise Unsupported(f"backend {name!r} can't run here: {reason}")
        return cast("BackendName", name), _ASKED_FOR
    if device is not None and device.type == "cpu":
        return "host", "device is the CPU"
    if not (reason := missing("lsa")):  # what it wants of a machine all GPU backends want
        return "lsa", "GPUs reach each other by load and store"
    if device is not None and device.type == "cuda":
        raise Unsupported(f"no GPU backend can run here: lsa: {reason}")
    return "host", f"no GPU backend can run here (lsa: {reason})"


def open_session(
    name: str, why: str, ranks: Rendezvous, shape: _native.Shape, device: torch.device | None, timeout_s: float
) -> tuple[Session, str]:
    """Open a session of the backend that choose() has found; return it and the reason for the backend.  Collective.

    If no rank has asked for the backend by name, and it can't connect these ranks, the next one is tried.

    Raises:
        NoRoom: out of device memory on some rank.
        Unsupported: none works; names what each lacks.
    """
    if name not in _ON_GPUS:
        return load(name).open(ranks, shape, device, timeout_s), why
    return _open(name, why, ranks, lambda backend: backend.open(ranks, shape, device, timeout_s))


def open_peers(
    name: str, why: str, ranks: Rendezvous, nbytes: int, device: torch.device | None, timeout_s: float
) -> tuple[Peers, str]:
    """Open `nbytes` of memory on every rank, without kernels; return it and the reason for the backend.  Collective.

    Raises:
        As open_session().
    """
    return _open(name, why, ranks, lambda backend: backend.open_peers(ranks, nbytes, device, timeout_s))


def _open(name: str, why: str, ranks: Rendezvous, open_with: Callable[[Backend], _T]) -> tuple[_T, str]:
    if name not in _ON_GPUS or b"\1" in ranks.all_gather(bytes([why == _ASKED_FOR])):
        return open_with(load(name)), why
    reasons: list[str] = []
    for candidate in _ON_GPUS:
        try:
            with all_or_none(ranks):
                if reason := missing(candidate):
                    raise Unsupported(reason)
            opened = open_with(load(candidate))
        except NoRoom:
            raise
        except Unsupported as error:
            reasons.append(f"{candidate}: {error}")
            continue
        return opened, f"what comes before it can't reach all ranks ({'; '.join(reasons)})" if reasons else why
    raise Unsupported(f"no GPU backend can run here: {'; '.join(reasons)}")
