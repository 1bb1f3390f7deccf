"""Copies of experts for one round: balance="replicate" of an expert layer.

The step ahead of the dispatch has chosen experts and empty slots, alike on all ranks (moecomm/base/replicas.py).  A
rank then fills its own slots, and reads the weights where their owner has them, in a Window.  On GPUs a kernel does
(csrc/window/copies.cuh), because addresses depend on the choice, which no host knows.

The owner has written the weights before it entered the round, and may write them again when the layer has ended: it
then has a header that each rank has sent behind its copies.  GPUs copy before the dispatch, which waits for the headers
of all ranks; the rest of a fused layer does not.  CPU ranks copy behind the dispatch and before the combine, which
waits for headers as well.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from moecomm import _native
from moecomm.base.choices import BALANCES, Balance
from moecomm.base.placement import NONE
from moecomm.base.validation import check_name
from moecomm.errors import BadInput
from moecomm.gpu import cuda_driver, plain_kernel
from moecomm.gpu.structs import struct
from moecomm.rounds.rounds import Rounds
from moecomm.weights.exchange import SharedTensor, SharedTensors

_BLOCKS = 128  # which wait for nothing: as many multiprocessors as there are share them


COPY = plain_kernel.PlainKernel("window/copies", "copy_experts", "CopyArgs", 512)


class Copies(NamedTuple):
    """The copies of one layer: all tensors of an expert, from its slot to an empty one.

    Attributes:
        rounds: of the Buffer.
        tensors: of its slots, in the order of arguments.
        compared: what ranks must pass alike, because an expert is computed where a copy of it is: see
            moecomm.dispatch.options.Request.experts.
    """

    rounds: Rounds
    tensors: list[SharedTensor]
    compared: tuple[tuple[str, str], ...]

    @property
    def _table(self) -> int:
        """Address of the table of copies in the window."""
        context = self.rounds.session.context
        return int(context.peers[self.rounds.rank]) + _native.copied_at(context.window, context.shape)

    def sources(self) -> torch.Tensor:
        """Return int64 `[ranks, slots]` on the CPU: the slot that each slot is a copy of in the last round, or -1.

        GPUs: waits for the current stream.
        """
        rounds = self.rounds
        if rounds.on_cpu:
            words = torch.tensor(list((ctypes.c_int32 * rounds.num_experts).from_address(self._table)))
        else:
            words = cuda_driver.int32_at(self._table, rounds.device, rounds.num_experts).cpu()
        return words.long().view(rounds.num_ranks, -1)

    def run(self) -> None:
        """Fill slots of this rank by the copies that have been chosen last.  GPUs: on the current stream."""
        if not self.rounds.on_cpu:
            self.run_kernel()
            return
        rounds, found = self.rounds, self.sources()
        for slot, source in enumerate(found[rounds.rank].tolist()):
            if source == NONE:
                continue
            rank, theirs = divmod(source, found.shape[1])
            for tensor in self.tensors:
                tensor.of(rounds.rank)[slot].copy_(tensor.of(rank)[theirs])

    def run_kernel(self) -> None:
        """Fill slots by the kernel, which reads the choice from this rank's window."""
        rounds = self.rounds
        slots = len(rounds.local_experts)
        args = struct("CopyArgs")(copied=self._table, tensors=len(self.tensors), rank=rounds.rank, slots=slots)
        for nth, tensor in enumerate(self.tensors):
            args.peers[nth], args.offsets[nth] = tensor.window.pointers.data_ptr(), tensor.offset
            args.nbytes[nth] = tensor.row_bytes
        plain_kernel.launch_on(rounds.device, COPY, _BLOCKS, args)


def copies_of(
    rounds: Rounds, balance: Balance | None, activation: object, interleaved: bool, **weights: Any
) -> Copies | None:
    """Return the copies of a layer, for its forward or backward pass; None without `balance`.

    Args:
        rounds, balance, interleaved: see Buffer.moe.
        activation: with its limits.
        weights: tensors of the experts by argument, or tuples of them, or None.

    Raises:
        BadInput: another word, a Buffer without balanced replicas, tensors that are not those of ExpertWeights.
    """
    if balance is None:
        return None
    check_name("balance", balance, BALANCES)
    slots = rounds.slots
    if slots is None or slots.placement.choice != "balanced":
        placement = None if slots is None else slots.placement
        want = 'a Buffer whose placement has choice="balanced", and empty slots'
        raise BadInput("balance", f"{balance!r} in a Buffer with {placement}", want)
    tensors, names, shared = [], [], rounds.parts.get(SharedTensors)
    for name, given in weights.items():
        for part in given if isinstance(given, tuple) else (given,):
            if part is None:
                continue
            found = shared.by_address.get(part.data_ptr()) if isinstance(shared, SharedTensors) else None
            if found is None:
                raise BadInput(name, "a tensor of its own", "one of ExpertWeights of this Buffer")
            tensors.append(found)
            names.append(f"{name}: {found.name}")
    slots.note_copies()
    compared = {"experts": ", ".join(names), "activation": str(activation), "interleaved": str(bool(interleaved))}
    if not rounds.on_cpu:
        plain_kernel.load(COPY, rounds.device.index)  # now: loading waits for kernels that are running
    return Copies(rounds, tensors, tuple(compared.items()))
