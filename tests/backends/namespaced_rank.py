"""A rank that runs in a PID namespace of its own: `python namespaced_rank.py STORE RANK RANKS`."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

import moecomm


def main(store: str, rank: int, ranks: int) -> None:
    """Rounds until the last rank ends without a word in the 21st; prints our pid, and who was lost, and how late."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    buffer = moecomm.Buffer(
        dist.group.WORLD, hidden=64, num_experts=2 * ranks, topk=2, max_tokens=8, backend="host", timeout_s=240.0
    )
    idx = torch.randint(2 * ranks, (8, 2), generator=torch.Generator().manual_seed(rank))
    x, rounds, begin = torch.full((8, 64), float(rank), dtype=torch.bfloat16), 0, 0.0
    try:
        while True:
            if rank == ranks - 1 and rounds == 20:
                os._exit(0)
            begin = time.monotonic()
            routed = buffer.dispatch(x, idx)
            assert torch.equal(buffer.combine(routed.x, routed.handle), 2 * x)
            rounds += 1
    except moecomm.PeerLost as error:
        print(os.getpid(), rounds, error.peer, time.monotonic() - begin < 60, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
