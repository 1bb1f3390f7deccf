"""Records of GPUs, by a few kernels for many experts (csrc/window/weights.cuh).

A kernel casts each weight straight into the record, which may be a peer's, and hashes what it stores.  Where a cast has
no such kernel, torch casts one tensor after the other, and a kernel copies and hashes what it leaves: casts to a dtype;
"fp8" of matrices whose rows are no multiple of 16 columns or begin elsewhere than at 16 bytes, or of several matrices
of which each has other than a multiple of 128 rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from moecomm.base import formats
from moecomm.base.protocol import PASS_THREADS
from moecomm.dispatch.reference import GROUP
from moecomm.gpu import plain_kernel, row_pass
from moecomm.gpu.quantize_rows import PIECE
from moecomm.gpu.structs import struct
from moecomm.transfer.casts import Kind
from moecomm.transfer.records import ALIGNMENT, WORD, Arriving, Leaving, Piece, Records

# Links idle between two batches.  Readers begin behind the first one, and hash the last one when nothing else moves.
_BATCHES, _LEAST_BATCH = 8, 64 << 20  # of a stage(); bytes
_OF_A_THREAD = 64  # bytes that a thread copies at once


@cache
def kernel(entry: str, args: str) -> plain_kernel.PlainKernel:
    """Return a kernel of csrc/window/weights.cuh."""
    return plain_kernel.PlainKernel("window/weights", entry, args, PASS_THREADS)


def copy_kernel() -> plain_kernel.PlainKernel:
    """Return the kernel that copies and hashes tensors."""
    return kernel("copy_weights", "CopyWeightsArgs")


def tell_kernel() -> plain_kernel.PlainKernel:
    """Return the kernel that tells readers."""
    return kernel("tell_readers", "TellArgs")


def cast_kernel(name: str, dtype: torch.dtype, aligned: bool) -> plain_kernel.PlainKernel:
    """Return the kernel that casts matrices of this dtype to a format.

    `aligned`: see moecomm.gpu.quantize_rows.kernel().  Blocks of "fp8" always are.
    """
    of = f"{row_pass.TYPES[dtype]}, Format::{name}, {str(aligned).lower()}"
    return kernel(f"cast_weights<{of}>", "CastWeightsArgs")


def largest_kernel(dtype: torch.dtype, aligned: bool) -> plain_kernel.PlainKernel:
    """Return the kernel that finds the largest magnitudes of matrices."""
    return kernel(f"find_largest<{row_pass.TYPES[dtype]}, {str(aligned).lower()}>", "CastWeightsArgs")


class _Jobs:
    """Work of kernels, in order: of each kernel, the jobs, and the threads that they want."""

    def __init__(self) -> None:
        self.copies: list[ctypes.Structure] = []
        self._copied = 0
        self._casts: dict[tuple[str, torch.dtype, bool], tuple[list[ctypes.Structure], list[int]]] = {}

    def copy(self, to: int, source: int, nbytes: int, found: int = 0) -> None:
        """Copy bytes; 0 for `to`: hash alone; 0 for `found`: do not hash."""
        if nbytes:
            self.copies.append(struct("CopyJob")(to, source, found, nbytes))
            self._copied += -(-nbytes // _OF_A_THREAD)

    def cast(self, key: tuple[str, torch.dtype, bool], job: ctypes.Structure, threads: int) -> None:
        """Cast a matrix by the kernel of these arguments of cast_kernel()."""
        jobs, all_threads = self._casts.setdefault(key, ([], []))
        jobs.append(job)
        all_threads.append(threads)

    def run(self, device: torch.device) -> None:
        """Enqueue all on the current stream."""
        for (name, dtype, aligned), (jobs, threads) in self._casts.items():
            if name == "nvfp4":
                _launch(device, largest_kernel(dtype, aligned), jobs, sum(threads))
            _launch(device, cast_kernel(name, dtype, aligned), jobs, sum(threads))
        _launch(device, copy_kernel(), self.copies, self._copied)


def _launch(device: torch.device, of: plain_kernel.PlainKernel, jobs: Sequence[ctypes.Structure], threads: int) -> None:
    """Launch a kernel for these jobs: several times if one launch does not take them all."""
    most = len(struct(of.args)().jobs)
    for begin in range(0, len(jobs), most):
        some = jobs[begin : begin + most]
        args = struct(of.args)(count=len(some))
        for nth, job in enumerate(some):
            args.jobs[nth] = job
        plain_kernel.launch_on(device, of, row_pass.blocks_of(threads), args)


class GpuCarrier:
    """A Carrier of GPUs."""

    def __init__(self, records: Records, device: torch.device) -> None:
        self._records, self._device = records, device

    def batch(self, experts: int) -> int:
        """Return an eighth of the experts, or as many as have 64 MiB."""
        return max(1, -(-experts // _BATCHES), _LEAST_BATCH // self._records.nbytes)

    def write(self, leaving: Sequence[Leaving], number: int) -> None:
        """Enqueue casts and copies, then copies of the hashes that these have left."""
        records, jobs, ends = self._records, _Jobs(), _Jobs()
        hashes = records.found(len(leaving), self._device)[:, 0]
        hashes[:, records.words - 1].fill_(number)
        largest: torch.Tensor | None = None
        if any(kind.cast == "nvfp4" for kind in records.kinds):
            largest = torch.zeros(len(leaving), len(records.kinds), dtype=torch.int32, device=self._device)
        kept: list[torch.Tensor] = []  # until kernels that read them are enqueued on the same stream
        for nth, (record, tensors) in enumerate(leaving):
            at = 0
            for of_kind, (kind, tensor) in enumerate(zip(records.kinds, tensors, strict=True)):
                pieces = records.pieces[at : at + len(kind.parts)]
                to = [record.data_ptr() + piece.begin for piece in pieces]
                found = hashes[nth].data_ptr() + WORD * at
                seen = 0 if largest is None else largest.data_ptr() + 4 * (nth * len(records.kinds) + of_kind)
                if not _cast(jobs, kind, tensor, to, found, seen, kept):
                    self._copy(jobs, kind.apply(tensor), pieces, to, found, kept)
                at += len(pieces)
            ends.copy(record.data_ptr() + records.trailer, hashes[nth].data_ptr(), WORD * records.words)
        jobs.run(self._device)
        ends.run(self._device)

    def tell(self, words: Sequence[torch.Tensor], value: int) -> None:
        """Enqueue the kernel that sets the words of readers."""
        args = struct("TellArgs")(value=value, count=len(words))
        for nth, word in enumerate(words):
            args.words[nth] = word.data_ptr()
        plain_kernel.launch_on(self._device, tell_kernel(), 1, args)

    def _copy(
        self,
        jobs: _Jobs,
        parts: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        to: Sequence[int],
        found: int,
        kept: list[torch.Tensor],
    ) -> None:
        """Copy and hash tensors that are cast."""
        for nth, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            part = part.contiguous()
            if part.data_ptr() % ALIGNMENT:
                part = part.clone()  # aligned, and hashed before it leaves
            kept.append(part)
            jobs.copy(to[nth], part.data_ptr(), piece.end - piece.begin, found + WORD * nth)

    def read(self, arriving: Sequence[Arriving]) -> None:
        """Enqueue copies and hashes of records."""
        records, jobs = self._records, _Jobs()
        for record, source, found in arriving:
            here, there = record.data_ptr(), source.data_ptr()
            for at, piece in enumerate(records.pieces):
                to = 0 if here == there else here + piece.begin
                jobs.copy(to, there + piece.begin, piece.end - piece.begin, found[0].data_ptr() + WORD * at)
            jobs.copy(found[1].data_ptr(), there + records.trailer, WORD * records.words)
        jobs.run(self._device)

    def switch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue copies of tensors."""
        jobs = _Jobs()
        for to, part in copies:
            if to.is_contiguous() and (to.data_ptr() | part.data_ptr()) % ALIGNMENT == 0:
                jobs.copy(to.data_ptr(), part.data_ptr(), part.nbytes)
                torch.autograd.graph.increment_version(to)
            else:
                to.copy_(part)
        jobs.run(self._device)


def _cast(
    jobs: _Jobs,
    kind: Kind,
    tensor: torch.Tensor,
    to: Sequence[int],
    found: int,
    largest: int,
    kept: list[torch.Tensor],
) -> bool:
    """Add the cast of a tensor to these addresses; return False if it has no kernel.

    `found`: address of the hashes of its parts.  `largest`: address of a word with 0, for NVFP4.
    """
    name = kind.cast
    if name is None or isinstance(name, torch.dtype):
        return False
    columns = tensor.shape[-1]
    matrix = tensor.reshape(-1, columns).contiguous()
    rows, aligned = len(matrix), columns % PIECE == 0 and matrix.data_ptr() % ALIGNMENT == 0
    if name == "fp8":
        if not aligned or (rows != tensor.shape[-2] and tensor.shape[-2] % GROUP):
            return False
        threads = -(-rows // GROUP) * -(-columns // GROUP) * PASS_THREADS
    elif formats.FORMATS[name].group == "row":
        threads = rows * PASS_THREADS
    else:
        threads = rows * -(-columns // (row_pass.ROW * PIECE)) * row_pass.ROW
    fields = {
        "x": matrix.data_ptr(),
        "values": to[0],
        "scales": to[1],
        "count": rows,
        "hidden": columns,
    }
    job = {"hash": found}
    if name == "nvfp4":
        fields["global_scale"], job["factor"] = largest, to[2]
    kept.append(matrix)
    jobs.cast((name, kind.dtype, aligned), struct("CastJob")(struct("QuantizeArgs")(**fields), **job), threads)
    return True
