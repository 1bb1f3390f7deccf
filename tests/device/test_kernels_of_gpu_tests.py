"""A kernel of every kind that the random cases on GPUs launch compiles for sm_90a, here, without a GPU.

Kinds that test_compile.py has are compiled there, at sizes of models.  `python -m tests.gpu.compile` compiles all
kernels, where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moecomm import _native
from moecomm.backends import host
from moecomm.backends.lsa_kernels import combine_spec, dispatch_spec
from moecomm.base import packets
from moecomm.buffer import Buffer
from moecomm.combine.arguments import takes_weights
from moecomm.dispatch.plan import END
from moecomm.gpu import jit, tuning
from moecomm.testing import Case, LocalBuffers, random_case
from moecomm.testing.check import again_call, dispatch_call
from moecomm.testing.prepare import prepare_combine, prepare_dispatch

from ..compiled import Compiled, check_memory_descriptor, compile_beside
from ..gpu import test_casts_on_the_way, test_nvlink, test_sequences, test_suspension, test_virtual_ranks
from . import test_compile

pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")

MOST = 64  # kernels of a set of sizes

Rounds = Iterator[tuple[dict[str, Any], Sequence[int]]]
# Sizes and random cases of other tests of virtual ranks, in one domain and in two.
FEW: list[tuple[dict[str, Any], Sequence[int]]] = [
    (test_suspension.RANDOM, range(test_suspension.CASES)),
    (test_sequences.SIZES, [seed for wrap in test_sequences.WRAPS for seed in test_sequences.seeds(wrap)]),
]


def rounds(cases: int, ranks: int = 4) -> Rounds:
    """Sizes, and the random cases that they get on so many GPUs: those of `pytest tests/gpu --gpu-cases cases`.

    Apart from those of cast_rounds().
    """
    for sizes in (*test_virtual_ranks.SIZES, test_virtual_ranks.LONG):
        yield sizes, test_virtual_ranks.random_seeds(sizes, cases)
    yield test_virtual_ranks.PAIR, [test_virtual_ranks.GOOD]
    yield from FEW
    yield from rounds_of_processes(cases, ranks)


def rounds_of_processes(cases: int, ranks: int) -> Rounds:
    """Return those of processes with a GPU each."""
    for sizes in test_nvlink.SIZES:
        yield {"ranks": ranks, **sizes}, test_nvlink.random_seeds(sizes, cases)
    yield {"ranks": ranks, "dtype": torch.bfloat16, **test_nvlink.SMALL}, []


def cast_rounds(cases: int) -> Iterator[tuple[dict[str, Any], Sequence[int], str]]:
    """Sizes, cases and formats of test_casts_on_the_way.py."""
    for sizes in test_casts_on_the_way.SIZES:
        for name in test_casts_on_the_way.NAMES:
            yield sizes, range(cases // test_casts_on_the_way.SHARE), name


def rounds_of_domains(cases: int, ranks: int = 4) -> Rounds:
    """Return the same of two and four domains: of two with two ranks, and of virtual ranks alone with one."""
    for sizes in (*test_virtual_ranks.DOMAINS, {**test_virtual_ranks.LONG, "domain_ranks": 1}):
        yield sizes, range(cases // len(test_virtual_ranks.DOMAINS))
    yield {**test_virtual_ranks.PAIR, "domain_ranks": 1}, [test_virtual_ranks.GOOD]
    for sizes, seeds in FEW:
        yield {**sizes, "domain_ranks": sizes["ranks"] // 2}, seeds
    yield from domains_of_processes(cases, ranks)


def domains_of_processes(cases: int, ranks: int) -> Rounds:
    """Return those of processes with a GPU each."""
    for near in sorted({max(1, ranks // 4), ranks // 2} - {0, ranks}):
        for sizes in test_nvlink.SIZES[:2]:
            yield {"ranks": ranks, "domain_ranks": near, **sizes}, test_nvlink.random_seeds(sizes, cases)
        yield {"ranks": ranks, "domain_ranks": near, "dtype": torch.bfloat16, **test_nvlink.SMALL}, []


def on_a_gpu(args: _native.DispatchArgs, layout: str) -> jit.KernelSpec:
    choice = tuning.choose("", args.ctx.shape.ranks, "dispatch", layout, args.num_tokens)
    args.chunk_tokens = choice.chunk_tokens
    return dispatch_spec(args)


def plain_round(buffer: Buffer, sizes: dict[str, Any]) -> set[jit.KernelSpec]:
    """Return what a dispatch and a combine without options launch."""
    x = torch.zeros(buffer.max_tokens, sizes["hidden"], dtype=buffer.dtype)
    routed = prepare_dispatch(buffer, x, torch.full((buffer.max_tokens, buffer.topk), -1))
    y = torch.empty(routed.handle.y_shape, dtype=buffer.dtype)
    brought = prepare_combine(buffer, y, routed.handle)
    return {on_a_gpu(routed.args, routed.handle.layout), combine_spec(brought.args)}


def kernels_of_rank(case: Case, rank: int, buffer: Buffer) -> set[jit.KernelSpec]:
    """Return what one rank launches in a case."""
    call = dispatch_call(case, rank, buffer.device)
    handle = (routed := prepare_dispatch(buffer, **call)).handle
    specs = {on_a_gpu(routed.args, case.layout)}
    if case.begin:
        half = prepare_dispatch(buffer, **call, begin=True).args
        specs.add(on_a_gpu(half, case.layout))
        half.part = END
        specs.add(on_a_gpu(half, case.layout))
    if case.again:
        specs.add(on_a_gpu(prepare_dispatch(buffer, **again_call(call, routed)).args, case.layout))
    y = buffer.empty(handle) if case.in_window else torch.empty(handle.y_shape, dtype=buffer.dtype)
    grads = None
    if case.weight_grads:
        grads = torch.empty(*handle.y_shape[:-1], *((buffer.topk,) if case.layout == "flat" else ()))
    given = case.own_weights[rank] if case.own_weights is not None and takes_weights(buffer.rounds) else None
    options = {"weighted": case.weighted, "wire": case.wire, "weight_grads": grads, "topk_weights": given}
    brought = prepare_combine(buffer, y, handle, **options)
    return specs | {combine_spec(brought.args)}


def kernels_of(sizes: dict[str, Any], seeds: Sequence[int], name: str = "") -> set[jit.KernelSpec]:
    """Return what these cases and a plain round launch: prepared as for a GPU, on the CPU, and not run.

    `name`: of a format to which the rows are cast.
    """
    virtual = bool(name) or sizes in (*test_virtual_ranks.SIZES, test_virtual_ranks.LONG)
    room = test_virtual_ranks.packet_room(sizes) if virtual else packets.room
    with patch.object(host, "packet_bytes", room), LocalBuffers(**sizes, backend="host") as ranks:
        for buffer in ranks.buffers:
            buffer.rounds.session.casts_formats = True  # type: ignore[misc]
            buffer.rounds.session.reduced_rows_in_heap = True  # type: ignore[misc]
        specs = plain_round(ranks.buffers[0], sizes)
        for seed in seeds:
            if name:
                case = test_casts_on_the_way.cast_case(seed, sizes, name)
            else:
                case = random_case(seed, **test_virtual_ranks.of_cases(sizes), few_kernels=True)
            for rank, buffer in enumerate(ranks.buffers):
                specs |= kernels_of_rank(case, rank, buffer)
    return specs


def test_kernels_of_several_domains_put() -> None:
    """Some of those that the random cases across domains launch; tests/device/test_compile.py compiles such."""
    for sizes in test_virtual_ranks.DOMAINS:
        specs = kernels_of(sizes, range(8))
        assert len(specs) > 5 and not any(spec.packets for spec in specs)
        assert {(spec.transport, spec.domain_ranks) for spec in specs} == {("puts", sizes["domain_ranks"])}


def kind_of(s: jit.KernelSpec) -> tuple[Any, ...]:
    """Return what branches of the source depend on, but for sizes and types."""
    sent = (s.quantize, s.format, s.scale_bytes > 0, s.scale_columns, s.packets)
    return s.op, s.layout, s.part, *sent, s.wire, s.own_weights, s.in_place


@pytest.mark.compiled
@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_kernel_of_every_kind_compiles(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    # No kernel depends on what is in a row, and most of the work of making a case would be that.
    monkeypatch.setattr(torch, "randn", lambda *shape, generator: torch.zeros(shape))
    there = {kind_of(spec) for spec in test_compile.SPECS.values() if spec.transport == "lsa"}
    met: set[tuple[Any, ...]] = set()
    compiling: dict[tuple[Any, ...], Future[Compiled]] = {}
    cases = request.config.getoption("--gpu-cases")
    for of in (*rounds(cases), *cast_rounds(cases)):
        specs = kernels_of(*of)
        assert len(specs) <= MOST, "a GPU has not that much time"
        for spec in sorted(specs, key=repr):
            met.add(kind := kind_of(spec))
            if kind not in there and kind not in compiling:
                compiling[kind] = compile_beside(spec)
    print(f"{len(met)} kinds, {len(compiling)} kernels")
    assert len(met) > 20, "cases of every kind were met"
    for kind, compiled in compiling.items():
        assert len(compiled.result().cubin) > 10_000, kind
        check_memory_descriptor(compiled.result())
