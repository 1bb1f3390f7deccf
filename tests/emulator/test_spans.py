"""Kernels with spans on CPUs: results are those without, and each role of each block says when it worked."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.gpu import jit, span_ring
from moecomm.observe.tracing.files import DeviceSpan, decode
from moecomm.testing import LocalBuffers, check_case, random_case, random_layer
from moecomm.testing import ranks as local

from . import gemm_machine, machine
from .test_expert_layer import Emulated

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 8, "topk": 3, "max_tokens": 20, "dtype": torch.bfloat16}


class Traced(machine.Machine):
    """The machine with kernels that are compiled with spans; spans of each rank, by round."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = torch.zeros(1 << 14, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.ring = span_ring.SpanRing(*self._memory)
        self.found: list[list[DeviceSpan]] = []

    def tell(self, library: ctypes.CDLL) -> ctypes.CDLL:
        ring = (ctypes.c_char * len(self.ring.descriptor)).in_dll(library, span_ring.SYMBOL)
        ring.raw = self.ring.descriptor
        return library

    def _kernel(self, spec: jit.KernelSpec) -> Any:
        return self.tell(super()._kernel(replace(spec, traced=True)))

    def watch(self, ranks: LocalBuffers) -> None:
        self.found = [[] for _ in ranks.buffers]
        for buffer, found in zip(ranks.buffers, self.found, strict=True):
            write = self._writer(found)
            assert self.ring.watch(buffer.rounds.session.context.record, write)

    @staticmethod
    def _writer(found: list[DeviceSpan]) -> span_ring.Write:
        def write(content: bytes, lost: int) -> None:
            assert lost == 0
            found.extend(decode(content))

        return write

    def rounds(self, rank: int) -> dict[int, dict[str, list[DeviceSpan]]]:
        """Spans of each role of each round."""
        self.ring.drain()
        rounds: dict[int, dict[str, list[DeviceSpan]]] = defaultdict(lambda: defaultdict(list))
        for span in self.found[rank]:
            rounds[span.round][span.name].append(span)
        return rounds


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.forget()


@pytest.mark.parametrize("domain_ranks", [None, 1], ids=["one domain", "two domains"])
def test_rounds_have_the_same_results_and_every_role_has_a_span(
    domain_ranks: int | None, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=traced.run_all))
    with LocalBuffers(2, **SIZES, backend="host", domain_ranks=domain_ranks) as ranks:
        traced.watch(ranks)
        for seed in range(3):
            check_case(ranks, random_case(seed, ranks=2, **SIZES))
        made = ranks.buffers[0].rounds.flight.rounds
        traced.forget()
        for rank in range(2):
            rounds = traced.rounds(rank)
            assert sorted(rounds) == list(range(1, made + 1))
            for number, roles in rounds.items():
                assert {"kernel", "agree"} <= roles.keys() or {"kernel", "pull"} <= roles.keys(), (number, roles)
                for name, spans in roles.items():
                    for span in spans:
                        (around,) = (s for s in roles["kernel"] if s.track.split()[1] == span.track.split()[1])
                        # Its first thread may end before others do.
                        assert around.begin_ns <= span.begin_ns <= span.end_ns, (name, span)
            seen = {name for roles in rounds.values() for name in roles}
            assert {"send", "reduce", "pull"} <= seen
            assert domain_ranks is None or {"put", "forward", "return forward"} <= seen


def test_a_layer_shows_fetch_both_products_and_the_return(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = Emulated(traced, monkeypatch)
    units = gemm_machine.units()

    def compiled(kernel: Any) -> ctypes.CDLL:
        return traced.tell(
            units.library(
                f'#include "tensor_cores.h"\n{span_ring.DEFINITION}#include "{kernel.header}.cuh"\n'
                'using namespace moecomm;\nextern "C" void kernel(const void* a) '
                f"{{ {kernel.entry}(*static_cast<const {kernel.args}*>(a)); }}\n"
                f"auto& used = {span_ring.SYMBOL};\n"
            )
            if kernel.header.startswith("fused/")
            else gemm_machine_compiled(kernel)
        )

    gemm_machine_compiled = gemm_machine.compiled
    monkeypatch.setattr(gemm_machine, "compiled", compiled)
    sizes: dict[str, Any] = {
        "ranks": 2,
        "hidden": 32,
        "intermediate": 32,
        "num_experts": 4,
        "topk": 2,
        "max_tokens": 40,
    }
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    case = random_layer(0, **sizes, dtype=torch.bfloat16)
    case.wire = None
    for rank in range(2):  # every expert has rows
        case.topk_idx[rank] = torch.stack([(torch.arange(len(case.x[rank])) + k) % 4 for k in (0, 1)], dim=1)
    with LocalBuffers(**of_buffer, backend="host", timeout_s=20) as ranks:
        traced.watch(ranks)
        outs = emulated.fused(ranks, [case.call(rank) for rank in range(2)])
        ranks.check()
        for rank, out in enumerate(outs):
            case.check(rank, out)
            (roles,) = traced.rounds(rank).values()
            wanted = ("publish", "kernel", "agree", "send", "fetch", "await rows", "await tiles", "gemm 1", "gemm 2")
            assert {*wanted, "send results", "await results", "reduce"} <= roles.keys()
            assert min(s.begin_ns for s in roles["fetch"]) <= min(s.begin_ns for s in roles["gemm 1"])
            assert min(s.end_ns for s in roles["gemm 1"]) <= min(s.begin_ns for s in roles["gemm 2"])
            assert max(s.end_ns for s in roles["await results"]) <= max(s.end_ns for s in roles["reduce"])
            for sending in roles["send results"]:  # the end of a tile of the second product
                assert any(s.begin_ns <= sending.begin_ns and sending.end_ns <= s.end_ns for s in roles["gemm 2"])
