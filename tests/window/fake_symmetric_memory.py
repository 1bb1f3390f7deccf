"""Torch's symmetric memory on CPUs: torch has it for GPUs only, and these files stand for theirs."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed._symmetric_memory as real

from moecomm.ranks.rendezvous import rendezvous


class FakeSymmetricMemory:
    """The calls of Windows to torch.distributed._symmetric_memory, between processes that share a folder.

    An allocation begins inside a block, at another offset on each rank, as in a memory pool of torch.
    """

    def __init__(self, folder: str, rank: int, *, says_what_is_symmetric: bool = True) -> None:
        self._folder, self._rank, self._blocks = Path(folder), rank, dict[int, tuple[Path, int]]()
        self._mapped: list[Any] = []
        self.rendezvous_calls = 0
        real.empty, real.rendezvous = self.empty, self.rendezvous  # type: ignore[assignment]
        if says_what_is_symmetric:
            real.is_symm_mem_tensor = lambda tensor: self._key(tensor) in self._blocks
        else:  # torch before 2.12
            vars(real).pop("is_symm_mem_tensor", None)  # torch 2.11 has none

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return memory full of ones."""
        assert torch.device(device).type == "cpu"
        offset = 256 * (self._rank + 1)
        path = self._folder / f"{self._rank}.{len(self._blocks)}.{os.getpid()}"
        tensor = torch.empty(size, dtype=dtype, device="meta")
        path.write_bytes(b"\1" * (offset + tensor.nbytes))
        made = torch.frombuffer(self._map(path), dtype=dtype, count=tensor.numel(), offset=offset).view(size)
        self._blocks[self._key(made)] = path, offset
        return made

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Any:
        """Return the handle, or None for memory of another kind."""
        if (block := self._blocks.get(self._key(tensor))) is None:
            return None
        self.rendezvous_calls += 1
        names = rendezvous(group).all_gather(block[0].name.encode().ljust(64))
        paths = [self._folder / name.decode().rstrip() for name in names]
        views = [torch.frombuffer(self._map(path), dtype=torch.uint8) for path in paths]
        return SimpleNamespace(
            rank=group.rank(),
            world_size=group.size(),
            buffer_ptrs=[view.data_ptr() for view in views],
            offset=block[1],
            keeps=views,
        )

    def _map(self, path: Path) -> mmap.mmap:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        self._mapped.append(mapped)
        return mapped

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()
