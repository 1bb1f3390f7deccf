"""python -m tests.gpu.compile_rounds RANKS MODEL... [--through TRANSPORT...]: kernels of `moecomm bench
dispatch-combine`, by all cores.

TRANSPORT is lsa (one domain), or what reaches two domains and four: puts, nic, gin_proxy, nvshmem; of the first model
alone.  Ranks that compile while they run wait for each other's compilers, one kernel after the other.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import lru_cache
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch

from moecomm import _native
from moecomm.backends.lsa_kernels import combine_spec
from moecomm.base import formats
from moecomm.buffer import Buffer
from moecomm.gpu import jit, quantize_rows
from moecomm.router import MODELS
from moecomm.testing.prepare import prepare_combine, prepare_dispatch
from tests.device.test_kernels_of_gpu_tests import on_a_gpu
from tests.gpu.compile_models import opened

DEEPSEEK, TOKENS = "deepseek-v3", (1, 128, 4096)
LAYOUTS, WIRES = ("flat", "expert", "batched"), (None, "exact")
PAYLOADS: tuple[dict[str, Any], ...] = (
    {},
    *({"quantize": name, "x_global_scale": 1.0 if fmt.takes_global else None} for name, fmt in formats.FORMATS.items()),
)


def kernels(
    ranks: int, transport: str, tokens: int, model: str = DEEPSEEK, domains: int = 2
) -> Iterator[jit.KernelSpec]:
    """Dispatches and combines as ranks of GPUs prepare them.  Models but for DeepSeek-V3 have bf16 and FP8 alone."""
    where = {} if transport == "lsa" else {"domain_ranks": max(1, ranks // domains)}
    payloads = PAYLOADS if model == DEEPSEEK else PAYLOADS[:2]
    with opened(MODELS[model], ranks, tokens, **where) as buffer:
        for spec in of_rounds(buffer, tokens, payloads=payloads):
            yield spec if spec.transport == "lsa" else replace(spec, transport=transport)


def of_rounds(
    buffer: Buffer,
    tokens: int,
    combined: Callable[[_native.CombineArgs], jit.KernelSpec] = combine_spec,
    payloads: Sequence[dict[str, Any]] = PAYLOADS,
) -> Iterator[jit.KernelSpec]:
    """Yield the kernels of a Buffer's rounds of every layout.  `combined` returns that of a combine."""
    ids, weights = torch.full((tokens, buffer.topk), -1), torch.zeros(tokens, buffer.topk)
    x = torch.zeros(tokens, buffer.hidden, dtype=torch.bfloat16)
    for layout, payload in itertools.product(LAYOUTS, payloads):
        with mock.patch.object(quantize_rows, "cast", _cast):
            routed = prepare_dispatch(buffer, x, ids, weights, layout=layout, max_rows=64, **payload)
        yield on_a_gpu(routed.args, layout)
        if payload:
            continue
        ys = torch.empty(routed.handle.y_shape, dtype=torch.bfloat16), buffer.empty(routed.handle)
        for y, wire in itertools.product(ys, WIRES):
            yield combined(prepare_combine(buffer, y, routed.handle, wire=wire).args)


def _cast(x: torch.Tensor, name: str, **how: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _cast_zeros(x.shape, x.dtype, name, tuple(how.items()))


@lru_cache(maxsize=16)
def _cast_zeros(shape: torch.Size, dtype: torch.dtype, name: str, how: tuple[tuple[str, Any], ...]) -> Any:
    """Kernels do not depend on values of rows, and casts of them take most of the time."""
    return formats.quantize(torch.zeros(shape, dtype=dtype), name, **dict(how))


def compile_all(found: Collection[jit.KernelSpec]) -> None:
    """Compile kernels into the cache, and print their number and the time."""
    begin = time.monotonic()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(jit.compile, found))
    print(f"{len(found)} kernels in {time.monotonic() - begin:.0f} s")


def main(words: Sequence[str] | None = None) -> None:
    """Compile all."""
    parser = argparse.ArgumentParser("tests.gpu.compile_rounds", usage=__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--through", nargs="+", default=["lsa"])
    given = parser.parse_args(words)
    ways = [(way, domains) for way in given.through for domains in ((1,) if way == "lsa" else (2, 4))]
    first, *others = given.models
    asked = [*((*way, first) for way in ways), *(("lsa", 1, model) for model in others)]
    found = {
        spec
        for (way, domains, model), tokens in itertools.product(asked, TOKENS)
        for spec in kernels(given.ranks, way, tokens, model, domains)
    }
    compile_all(found)


if __name__ == "__main__":
    main()
