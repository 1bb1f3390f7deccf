"""Routing recorded from a GPU: ids of each call without a wait of the host, and named errors in captures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moecomm
from moecomm.errors import Unsupported
from moecomm.routing import Recorded, RoutingRecorder

from ..routing.test_recorder import calls


@pytest.mark.gpu1
def test_copies_from_a_gpu_do_not_wait_and_captures_are_refused(tmp_path: Path) -> None:
    """The ids of each call, although the caller overwrites them at once behind work that takes a while."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    wanted = [torch.randint(-1, 8, (64, 3), generator=torch.Generator().manual_seed(n)).pin_memory() for n in range(20)]
    with RoutingRecorder(tmp_path / "x", experts=8, watch=(), weights=True) as recorder, torch.cuda.stream(stream):
        ids = torch.empty(64, 3, dtype=torch.int64, device="cuda")
        recorder.add("warm", ids.fill_(0))
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 28)  # type: ignore[no-untyped-call]
        for given in wanted:
            ids.copy_(given, non_blocking=True)
            recorder.add("a", ids)
        assert not stream.query(), "the host has waited"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            ids.add_(0)
            with pytest.raises(Unsupported, match="'a' in the capture of a CUDA graph"):
                recorder.add("a", ids)
    found = calls(Recorded.load(recorder.files[0]))
    assert found[1:] == [("a", step, given.tolist()) for step, given in enumerate(wanted)]


@pytest.mark.gpu1
def test_dispatches_of_a_gpu_are_recorded(tmp_path: Path) -> None:
    """One rank of lsa; the ids of no expert, of which the device alone knows, are left out."""
    sizes = {"hidden": 64, "num_experts": 8, "topk": 3, "max_tokens": 64}
    wanted = [torch.randint(-1, 8, (n, 3), generator=torch.Generator().manual_seed(n)) for n in (64, 0, 5, 33)]
    with moecomm.Buffer("self", **sizes, device="cuda") as buffer, RoutingRecorder(tmp_path / "x") as recorder:
        for dtype in (torch.int64, torch.int32):
            for ids in wanted:
                x = torch.ones(len(ids), 64, dtype=torch.bfloat16, device="cuda")
                buffer.dispatch(x, ids.to("cuda", dtype), sync=True)
        recorder.add("buffer0", torch.full((2, 3), 8, device="cuda"))
    found = calls(Recorded.load(recorder.files[0]))
    assert found == [("buffer0", step, ids.tolist()) for step, ids in enumerate(wanted * 2)]
