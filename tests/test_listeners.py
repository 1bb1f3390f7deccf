"""An open Buffer has no socket that listens: neither a port nor a name to which another process could connect."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

import torch

import moecomm

from .conftest import Ranks

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 4, "topk": 2, "max_tokens": 8, "backend": "host", "timeout_s": 20}


def listeners() -> set[str]:
    """Sockets of this process that take connections, by their inodes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(target)
    return found


def of_a_life(rank: int, group: Any) -> tuple[bool, list[set[str]]]:
    """Listeners that were not there before, at each station of the life of a Buffer, and of a Window."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        seen = bool(listeners())
    before = listeners()  # gloo's
    with moecomm.Buffer(group, **SIZES) as buffer, moecomm.Window(group, 64, backend="host") as window:
        found = [listeners()]
        routed = buffer.dispatch(torch.ones(4, 64).bfloat16(), torch.arange(8).view(4, 2) % 4)
        buffer.combine(routed.x, routed.handle)
        window.barrier()
        found.append(listeners())
        del routed
        buffer.release_memory()
        buffer.restore()
        buffer.shrink()
        found.append(listeners())
        buffer.grow(group)
        found.append(listeners())
    found.append(listeners())
    return seen, [now - before for now in found]


def test_no_socket_listens(ranks: Ranks) -> None:
    for seen, found in ranks.run(2, of_a_life):
        assert seen and found == [set()] * 5
