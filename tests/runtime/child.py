"""Programs of tests in processes of their own.  A child loads the native module alone: it is ready in milliseconds.

    python child.py <path of the native module> <function> <arguments as JSON>

The function talks to the test over standard input and output, one JSON value a line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from typing import Any

_HEADER_WORDS = 24  # kHeaderWords in csrc/protocol/round_header.h
_FIRST_TAG = 3  # round_tag(1)


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("moecomm._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def hear() -> Any:
    return json.loads(sys.stdin.readline())


class EmptyRounds:
    """Ranks of this process whose dispatch moves no token: all that is left is the protocol's waiting."""

    def __init__(self, native: Any, ranks: int, timeout_s: float = 20) -> None:
        self.native = native
        shape = native.Shape(ranks, 2 * ranks, 2, 64, ring_tokens=32, staged_row_bytes=256, heap_bytes=1 << 16)
        self.layout = native.window_layout(shape)
        self.windows = [native.HostWindow(self.layout.bytes) for _ in range(ranks)]
        self.memory = [native.host_alloc(2048) for _ in range(ranks)]
        self.args = [self._dispatch(shape, rank, timeout_s) for rank in range(ranks)]

    def _dispatch(self, shape: Any, rank: int, timeout_s: float) -> Any:
        args = self.native.DispatchArgs()
        args.ctx.set_shape(shape)
        args.ctx.rank = rank
        args.ctx.peers = [window.address for window in self.windows]
        at = self.memory[rank].address
        args.ctx.record, args.ctx.abort_host = at, at + 256
        args.ctx.timeout_ns = int(timeout_s * 1e9)
        args.hidden, args.row_bytes, args.idx_bytes = 8, 16, 8
        args.chunk_tokens, args.alignment, args.workers, args.layout = 8, 1, 1, 1
        args.route.sent, args.num_rows = at + 512, at + 1792
        args.tokens_per_expert, args.rows_per_expert = at + 1536, at + 1664
        return args

    def failure(self, rank: int) -> Any:
        return self.native.record(self.args[rank].ctx.record)

    def announced(self, rank: int, at: int) -> bool:
        """Has `rank` told `at` of the first round?  The tag is the upper half of a word of mail.

        This is the last word of the counts, which stand behind the notice.
        """
        mail = self.layout.tagged_words + (len(self.windows) + rank) * self.layout.num_tagged_words * 8
        words = _HEADER_WORDS + self.layout.columns
        return bool(self.native.read_word(self.windows[at].address + mail + words * 8 - 4) == _FIRST_TAG)


def run_round(native: Any, args: Any) -> None:
    """Run a round of one rank, as the session of a CPU rank does."""
    native.HostRunner(native.Turn())(args)


def exchange(native: Any, rank: int, ranks: int, nonce: str) -> None:
    """Passes a window whose first word is `rank` + 1, and tells the first words of all windows."""
    window = native.HostWindow(4096)
    native.set_abort(window.address, 0, rank)
    passing = native.Exchange(rank, ranks, bytes.fromhex(nonce))
    say(passing.address.hex())
    fds = passing.share(window.fd, [bytes.fromhex(address) for address in hear()], 20.0)
    passing.close()
    windows = [window if fd < 0 else native.HostWindow.attach(fd, 4096) for fd in fds]
    say([native.read_word(peer.address) for peer in windows])
    hear()  # stays alive until all have read


def hold(native: Any) -> None:
    """Has one of everything, until it is killed."""
    passing = native.Exchange(0, 2, bytes(16))
    kept = [native.HostWindow(1 << 20), native.Watcher([0, os.getppid()], 0)]
    say(passing.address.decode())
    hear()
    del kept


def interrupted(native: Any, together: bool) -> None:
    """Ctrl-C in a round that cannot finish: one of two ranks, or two of three, wait for a rank that never comes."""
    ranks = 3 if together else 2
    rounds = EmptyRounds(native, ranks)
    pipe = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(pipe[1])
    sent = []

    def press() -> None:
        while not rounds.announced(0, ranks - 1):
            time.sleep(0.001)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with contextlib.suppress(KeyboardInterrupt):
        if together:
            native.host_run_all(rounds.args[:2])
        else:
            run_round(native, rounds.args[0])
        raise AssertionError("the round returned")
    took = time.monotonic() - sent[0]
    failure = rounds.failure(0)
    say(
        {
            "took": took,
            "code": failure.code,
            "peer": failure.peer,
            "word of the peer": native.read_word(rounds.windows[ranks - 1].address),
            "forwarded": list(os.read(pipe[0], 16)),
            "restored": signal.set_wakeup_fd(-1) == pipe[1],
        }
    )
    raise KeyboardInterrupt


def handled(native: Any) -> None:
    """A handler that does not raise: the round goes on, and the handler has run when it is over."""
    rounds = EmptyRounds(native, 2)
    came = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))

    def press_then_join() -> None:
        while not rounds.announced(0, 1):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        run_round(native, rounds.args[1])

    peer = threading.Thread(target=press_then_join)
    peer.start()
    run_round(native, rounds.args[0])
    peer.join()
    say({"failure": rounds.failure(0) is not None, "came": came})


def forked(native: Any) -> None:
    """A forked child of a process that has used everything can use everything, and drop what it inherited."""
    rounds = EmptyRounds(native, 1)
    run_round(native, rounds.args[0])
    watcher = native.Watcher([0, os.getppid()], 0)
    pid = os.fork()
    if pid == 0:
        watcher.close()
        run_round(native, rounds.args[0])
        interrupted(native, False)
    watcher.close()
    say(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in what it starts as a job
    path, function, arguments = sys.argv[1:]
    globals()[function](load(path), *json.loads(arguments))
