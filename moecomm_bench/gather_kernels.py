"""All-gather and product by kernels of a user's own over a Window: csrc/bench/gather_matmul.cu.

Any program can do the same: cuda.core compiles the file with moecomm.include_dir(), and launches its kernels with
Window.handle_address.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch

import moecomm
from moecomm.fused.kernels import multiprocessors
from moecomm.gpu import loader
from moecomm.window import Window

SOURCE = loader.headers() / "bench" / "gather_matmul.cu"
THREADS, BLOCKS_OF_SM, TILE = 256, 4, 16  # kThreads, kBlocks, kTile


def cubin(arch: str = "sm_90a") -> Any:
    """Compile for a GPU, without the cache.  Needs no GPU."""
    core = importlib.import_module("cuda.core")
    options = core.ProgramOptions(std="c++17", arch=arch, include_path=[moecomm.include_dir()])
    return core.Program(SOURCE.read_text(), "c++", options).compile("cubin")


@lru_cache(maxsize=8)
def _kernels(device: torch.device) -> dict[str, Any]:
    code = cubin(loader.architecture(torch.cuda.get_device_capability(device)))
    return {name: code.get_kernel(name) for name in ("naive_remote_read", "gather_rows")}


class GatherMatmul:
    """C = A B on one rank.  Every rank has some rows of A and all of B, and computes all of C.

    Calls are collective, enqueued on the current stream, and may be captured after the first one.  When a call has
    happened, all ranks have read this rank's rows.  A wait that fails is raised by Window.check().

    Attributes:
        a: float16 `[rows, depth]`, this rank's rows, at byte 0 of the Window.
        b: float16 `[depth, columns]`, equal on all ranks.
        gathered: float16 `[ranks * rows, depth]`, the rows of all ranks after a call that gathers.
        out: float16 `[ranks * rows, columns]`, the result of the last call.
        blocks: of a launch that gathers, the same on all ranks; all of them are resident.

    Args:
        window: one whose first `rows * depth` halves and `2 * ranks * rows` signals nothing else uses.
        rows: of A on each rank.
        columns: of B.
        depth: columns of A, a multiple of 8.
    """

    def __init__(self, window: Window, rows: int, columns: int, depth: int) -> None:
        assert depth % 8 == 0 and window.num_signals >= 2 * window.num_ranks * rows
        self._window, self._sizes, device = window, (rows, columns, depth), window.device
        all_rows = window.num_ranks * rows
        self.blocks = min(all_rows, BLOCKS_OF_SM * multiprocessors(device.index)) if device.type == "cuda" else all_rows
        self._turns = torch.zeros(all_rows, dtype=torch.int64, device=device)
        self.a = window.tensor((rows, depth), torch.float16)
        self.b, self.gathered, self.out = (
            torch.zeros(shape, dtype=torch.float16, device=device)
            for shape in ((depth, columns), (all_rows, depth), (all_rows, columns))
        )

    def naive_remote_read(self) -> torch.Tensor:
        """Compute each element by a thread that reads A from its owner."""
        rows, columns = self.out.shape
        tiles = -(-rows // TILE) * -(-columns // TILE)
        self._window.barrier()  # all ranks have written their rows
        self._launch("naive_remote_read", tiles, self.b.data_ptr(), self.out.data_ptr(), *self._sizes)
        self._window.barrier()  # all ranks have read them
        return self.out

    def gather_then_scalar(self) -> torch.Tensor:
        """Gather rows and multiply them, in one kernel."""
        self._gather(self.b.shape[1])
        return self.out

    def gather_then_matmul(self) -> torch.Tensor:
        """Gather rows by the same kernel, and multiply by torch's product."""
        self._gather(0)
        return torch.mm(self.gathered, self.b, out=self.out)

    def _gather(self, columns: int) -> None:
        rows, _, depth = self._sizes
        places = (tensor.data_ptr() for tensor in (self._turns, self.gathered, self.b, self.out))
        self._launch("gather_rows", self.blocks, *places, rows, columns, depth)

    def _launch(self, name: str, blocks: int, *numbers: int) -> None:
        core = importlib.import_module("cuda.core")
        stream = core.Stream.from_handle(torch.cuda.current_stream(self._window.device).cuda_stream)
        config = core.LaunchConfig(grid=blocks, block=THREADS)
        core.launch(stream, config, _kernels(self._window.device)[name], self._window.handle_address, *numbers)
