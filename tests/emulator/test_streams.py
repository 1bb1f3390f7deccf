"""Layers in streams, on CPUs: their kernels begin while those before them in the stream go on, as far as these let them
(programmatic dependent launch), all ranks at once.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.fused import pipeline
from moecomm.gpu import jit
from moecomm.testing import LocalBuffers, random_layer
from moecomm.testing import ranks as local
from moecomm.testing.prepare import prepare_moe

from ..wrap import wrap_after
from .gemm_machine import compiled
from .machine import LIMIT, Arguments, Call, Launch, Machine
from .test_expert_layer import SIZES, Emulated, nothing_is_left_of_earlier_layers

__all__ = ["nothing_is_left_of_earlier_layers"]  # a fixture


class Streams:
    """Launches of each rank, in its order, kept until all are run together."""

    def __init__(self, rounds: Machine, ranks: int) -> None:
        self._rounds = rounds
        self._of_rank: list[list[Launch]] = [[] for _ in range(ranks)]
        self._kept: list[Any] = []
        self._random = random.Random(0)

    def _add(self, rank: int, library: Any, content: bytes, *sizes: int) -> None:
        self._kept.append(content := ctypes.create_string_buffer(content, len(content)))
        entry = ctypes.cast(library.kernel, ctypes.c_void_p).value
        self._of_rank[rank].append(Launch(entry, ctypes.addressof(content), *sizes))

    def launch(self, of: pipeline.Fused, kernel: Any, blocks: int, args: ctypes.Structure) -> None:
        sizes = blocks, kernel.threads, kernel.shared_bytes
        self._add(of._rounds.rank, compiled(kernel), bytes(args), *sizes)

    def dispatch(self, args: Sequence[Arguments]) -> None:
        for rank, of in enumerate(args):
            call = Call(of, self._rounds.sizes)
            fields = jit.block_fields(call.spec)
            sizes = self._random.choice([1, 2, 3]), jit.block_threads(fields), fields["shared_bytes"]
            self._add(rank, self._rounds._kernel(call.spec), call.content, *sizes)

    def run(self, seed: int) -> None:
        launches: list[Launch] = []
        for mine in self._of_rank:
            for nth, launch in enumerate(mine):
                launch.after, launch.early = (len(launches) - 1, 1) if nth else (-1, 0)
                launches.append(launch)
        all_of_them = (Launch * len(launches))(*launches)
        ended = self._rounds.scheduler.emulator_run(ctypes.addressof(all_of_them), len(launches), 10 * LIMIT, seed)
        assert ended == 0, "it does not end"


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("most", [30, 1400], ids=["ids are told", "row descriptors are"])
@pytest.mark.long
def test_layers_whose_kernels_begin_early(
    most: int, fp8: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, in the same memory of the window, of which the second and the third take more than the one
    before: what they write there first is what others may still read.  In a Buffer of `most` tokens.
    """
    Emulated(machine, monkeypatch)
    sizes = SIZES[1] | {"ranks": 2, "num_experts": 4, "max_tokens": 30}
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"} | {"max_tokens": most}
    streams, kept = Streams(machine, sizes["ranks"]), []
    with LocalBuffers(**of_buffer, backend="host", timeout_s=600) as ranks:
        cases = [random_layer(seed, **sizes, dtype=torch.bfloat16, fp8=fp8) for seed in (3, 0, 5, 4)]
        wrap_after(ranks, 2 * len(cases) + 2)  # two rounds of each of them, then the layers whose rounds wrap
        calls = [[case.call(rank) for rank in range(sizes["ranks"])] for case in cases]
        wants, outs = [], []
        for case, mine in zip(cases, calls, strict=True):
            case.wire = None
            wants.append(ranks.moe([{**call, "wire": None, "fused": False} for call in mine]))
        monkeypatch.setattr(pipeline.Fused, "_launch", lambda of, *launch: streams.launch(of, *launch))
        monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=streams.dispatch))
        for mine in calls:
            given = [
                prepare_moe(buffer, **{**call, "wire": None, "fused": True})
                for buffer, call in zip(ranks.buffers, mine, strict=True)
            ]
            for one in given:
                one.publish()
            for one, routed in zip(given, ranks.dispatch_layers(given), strict=True):
                one.compute(routed)
            for one in given:
                one.prepare_reduce()
                one.run_reduce()
            assert all(isinstance(one, pipeline.Fused) for one in given)
            kept += [one._kept for one in given]  # the ranks' memory is one here
            outs.append([one.finish_reduce() for one in given])
        streams.run(seed=1)
        ranks.check()
        for case, out, want in zip(cases, outs, wants, strict=True):
            for rank in range(sizes["ranks"]):
                case.check(rank, out[rank])
                assert torch.equal(out[rank].view(torch.int16), want[rank].view(torch.int16)), (case.seed, rank)
