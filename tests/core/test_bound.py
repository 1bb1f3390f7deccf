"""Objects of one process, which are neither copied nor pickled, and tuples of tensors, which are."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.compat import deep_ep
from moecomm.overlap import Workspace

SIZES: dict[str, Any] = {"hidden": 32, "num_experts": 4, "topk": 2, "max_tokens": 8, "dtype": torch.float32}
_HANDLES = ("Handle", "ChunkedHandle", "LowLatencyHandle")
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": ForkingPickler.dumps,
    "torch.save": lambda value: torch.save({"job": [value]}, io.BytesIO()),
}


@pytest.fixture(scope="module")
def objects() -> Iterator[dict[str, Any]]:
    x, idx = torch.ones(4, 32), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    with (
        moecomm.Buffer("self", **SIZES, backend="host") as buffer,
        moecomm.Buffer("self", **SIZES, backend="host", capacity_factor=0.2) as small,
        moecomm.Window("self", nbytes=64, backend="host") as window,
    ):
        routed, leaf = buffer.dispatch(x, idx), x.clone().requires_grad_()
        low = deep_ep.Buffer("self", low_latency_mode=True, num_qps_per_rank=4)
        _, _, low_handle, _, _ = low.low_latency_dispatch(x.bfloat16(), idx, 8, 4, use_fp8=False)
        workspace = Workspace("self", nbytes=1 << 16, backend="host")
        yield {
            "Buffer": buffer,
            "Rounds": buffer.rounds,
            "Routed": routed,
            "Handle": routed.handle,
            "ChunkedHandle": small.dispatch(x, idx).handle,
            "Window": window,
            "Workspace": workspace,
            "deep_ep.Buffer": low,
            "LowLatencyHandle": low_handle,
            "Dispatched": ops.dispatch(buffer, leaf, idx),
            "ops.Handle": ops.dispatch(buffer, leaf, idx).handle,
            "ops.ChunkedHandle": ops.dispatch(small, leaf, idx).handle,
            "plain ops.Handle": ops.dispatch(buffer, x, idx).handle,
            "plain ops.ChunkedHandle": ops.dispatch(small, x, idx).handle,
        }
        workspace.close()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        *((name, "save the arguments it was opened with") for name in ("Buffer", "Rounds", "Window", "Workspace")),
        ("deep_ep.Buffer", "save the arguments it was opened with"),
        ("Routed", "save its tensors"),
        *((name, "save topk_idx and topk_weights, and dispatch again") for name in _HANDLES),
    ],
)
def test_what_belongs_to_a_process_says_what_to_save(
    objects: dict[str, Any], name: str, instead: str, how: str
) -> None:
    with pytest.raises(moecomm.Unsupported, match=f"{name.split('.')[-1]}, which belongs to this process: {instead}"):
        COPIES[how](objects[name])


@pytest.mark.parametrize("name", ["Dispatched", "ops.Handle", "ops.ChunkedHandle"])
def test_a_deep_copy_leaves_no_graph_behind_in_silence(objects: dict[str, Any], name: str) -> None:
    with pytest.raises(moecomm.Unsupported, match=r"has a gradient: replace it by \w+\.detach\(\) first"):
        copy.deepcopy(objects[name])


@pytest.mark.parametrize("name", ["plain ops.Handle", "plain ops.ChunkedHandle"])
def test_a_copied_tuple_of_tensors_serves_a_combine(objects: dict[str, Any], name: str) -> None:
    handle = objects[name]
    y = torch.arange(8.0 * 32).view(8, 32)
    room = y.new_zeros((*(handle.room if "Chunked" in name else (handle.max_rows,)), 32))
    room[:8] = y
    want = ops.combine(room, handle)
    for copied in (copy.copy(handle), copy.deepcopy(handle)):
        assert torch.equal(ops.combine(room, copied), want)
