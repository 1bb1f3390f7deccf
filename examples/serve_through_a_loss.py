"""Serve through the loss of a rank: the others mask it in the middle of decoding, and another process takes its place.

    python examples/serve_through_a_loss.py

Every expert lies on two of four ranks. In each step, each rank compares its tokens with those of a run without a loss,
bit for bit. Ranks are processes of this host; if it has GPUs, each rank takes one.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

import moecomm

RANKS, EXPERTS, HIDDEN, TOPK, TOKENS = 4, 4, 64, 2, 16
PLACEMENT = moecomm.Placement([[0, 1], [2, 3], [0, 1], [2, 3]])  # the loss of one rank loses no expert


def expert(x: torch.Tensor, number: int) -> torch.Tensor:
    """Compute one expert."""
    return torch.tanh(x * (0.25 + number))


def tokens(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, expert ids and routing weights of a step."""
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    routing = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK)
    return x, routing.indices, routing.values


def wanted(step: int, rank: int) -> torch.Tensor:
    """Return the output of a run without a loss."""
    x, ids, weights = tokens(step, rank)
    out = torch.zeros_like(x)
    for k in range(TOPK):  # in the order in which wire="rows" adds them
        rows = torch.stack([expert(row, int(number)) for row, number in zip(x, ids[:, k], strict=True)])
        out += weights[:, k : k + 1] * rows
    return out


def decode(buffer: moecomm.Buffer, step: int) -> torch.Tensor:
    """Run a step on this rank."""
    x, ids, weights = (tensor.to(buffer.device) for tensor in tokens(step, buffer.rank))
    routed = buffer.dispatch(x, ids, weights, layout="expert", sync=True)
    y, start = torch.empty_like(routed.x), 0
    for number, count in zip(PLACEMENT.held[buffer.rank], routed.tokens_per_expert.tolist(), strict=True):
        y[start : start + count] = expert(routed.x[start : start + count], number)
        start += count
    return buffer.combine(y, routed.handle, wire="rows").cpu()


class Meeting:
    """Messages of ranks outside rounds, over a store in a process that outlives them."""

    def __init__(self, port: int, rank: int, attempt: int) -> None:
        self.store, self.rank, self.attempt = dist.TCPStore("127.0.0.1", port, is_master=False), rank, attempt
        self._number = itertools.count()

    def group(self) -> Any:
        """Return the group of all ranks of this attempt."""
        return dist.ProcessGroup(dist.PrefixStore(f"{self.attempt}/", self.store), self.rank, RANKS)

    def next_step(self, step: int, masked: tuple[int, ...] = ()) -> int:
        """Return the least step of all ranks that take part, because they may have failed one call apart."""
        key = f"{self.attempt}/step/{next(self._number)}"
        self.store.set(f"{key}/{self.rank}", str(step))
        return min(int(self.store.get(f"{key}/{rank}")) for rank in range(RANKS) if rank not in masked)


class Server:
    """One rank.

    Args:
        attempt: 0, or 1 for a process that takes the place of a lost one.
    """

    def __init__(self, port: int, rank: int, attempt: int) -> None:
        self.meeting, self.after = Meeting(port, rank, attempt), Meeting(port, rank, 1)
        self.later = self.after.group()  # the group that the Buffer grows to
        sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
        group = self.meeting.group() if attempt == 0 else self.later
        self.buffer = moecomm.Buffer(
            group, **sizes, dtype=torch.float32, placement=PLACEMENT, on_timeout="mask", timeout_s=30
        )

    def serve(self, step: int, steps: int, lose_at: int) -> None:
        """Serve from a step on.  The last rank kills itself before step `lose_at`."""
        buffer = self.buffer
        while step < steps or buffer.masked:
            if (buffer.rank, step) == (RANKS - 1, lose_at):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                if not torch.equal(decode(buffer, step), wanted(step, buffer.rank)):
                    raise SystemExit(f"rank {buffer.rank}, step {step}: other tokens than without a loss")
                step += 1
            except moecomm.RoundFailed as error:
                say(f"rank {buffer.rank}, step {step}: {type(error).__name__}; masked are {buffer.masked}")
                step = self.meeting.next_step(step, buffer.masked)
            if buffer.masked and self.grows_before(step):
                buffer.grow(self.later, placement=PLACEMENT)
                self.meeting = self.after
                step = self.meeting.next_step(step)
                say(f"rank {buffer.rank}, step {step}: on {buffer.num_ranks} ranks again")
        buffer.close()

    def grows_before(self, step: int) -> bool:
        """Return whether ranks take in the new one before this step: rank 0 sees that it waits, and names the step."""
        store = self.meeting.store
        store.set("lost", "1")  # a process may be started
        if self.buffer.rank == 0 and not store.check(["grow"]) and self.buffer.joining(self.later) == [RANKS - 1]:
            store.set("grow", str(step + 2))  # no other rank has made this step yet
        return store.check(["grow"]) and int(store.get("grow")) == step


def run(port: int, rank: int, attempt: int, steps: int, lose_at: int) -> None:
    """Run one rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    server = Server(port, rank, attempt)
    step = server.meeting.next_step(sys.maxsize) if attempt else 0
    server.serve(step, steps, -1 if attempt else lose_at)
    say(f"rank {rank}: all tokens are those of a run without a loss")


def say(line: str) -> None:
    """Print a line in one write, so that lines of ranks do not mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Start the ranks, and another process when one is lost; return 0 if all have served all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lose-at", type=int, default=50, help="step before which the last rank kills itself")
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")

    def start(rank: int, attempt: int) -> Any:
        process = context.Process(target=run, args=(store.port, rank, attempt, args.steps, args.lose_at))
        process.start()
        return process

    ranks = [start(rank, 0) for rank in range(RANKS)]
    ranks[-1].join()
    store.get("lost")  # the others have masked it
    ranks[-1] = start(RANKS - 1, 1)
    for process in ranks:
        process.join()
    return max(process.exitcode for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
