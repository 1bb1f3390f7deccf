"""repr() of what users hold: one line, and never a wait."""

from __future__ import annotations

import pytest
import torch

import moecomm

H, E, K, T = 64, 8, 2, 4


def test_repr_says_sizes_and_state_without_touching_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, idx = torch.rand(T, H), torch.rand(T, E).topk(K).indices
    buffer = moecomm.Buffer("self", hidden=H, num_experts=E, topk=K, max_tokens=T, dtype=torch.float32)
    routed = buffer.dispatch_begin(x, idx, layout="batched", quantize="fp8", max_rows=T)
    begun, of_handle = repr(routed), repr(routed.handle)
    assert begun.endswith(", begun and not ended>") and of_handle.endswith(", begun and not ended>")
    buffer.dispatch_end(routed)
    exact = buffer.dispatch(x, idx, layout="flat", sync=True)

    def touched(*_: object) -> None:
        raise AssertionError("repr() waits, or makes a tensor")

    with monkeypatch.context() as watched:
        watched.setattr(type(buffer.rounds.session), "synchronize", touched)
        watched.setattr(moecomm.Routed, "_read", touched)
        assert repr(routed) == (
            f"<moecomm.Routed layout='batched', x [8, {T}, {H}] torch.float8_e4m3fn, scales torch.float32, cpu, "
            "rank 0 of 1, Buffer open>"
        )
        assert repr(exact).startswith(f"<moecomm.Routed layout='flat', x [{T}, {H}] torch.float32, cpu, ")
        assert repr(exact.handle) == (
            f"<moecomm.Handle layout='flat', {T} tokens, y [{T}, {H}], rank 0 of 1, Buffer open>"
        )
        assert repr(buffer) == (
            f"<moecomm.Buffer open, backend='host', rank 0 of 1, hidden={H}, num_experts={E}, topk={K}, "
            f"max_tokens={T}, torch.float32, cpu, {buffer.nbytes / 2**20:.1f} MiB>"
        )
        buffer.close()
        assert repr(buffer).startswith("<moecomm.Buffer closed, ")
        assert "Buffer closed" in repr(exact) and "Buffer closed" in repr(exact.handle)
        assert "\n" not in repr(buffer) + repr(routed) + repr(exact.handle)


def test_a_buffer_that_a_round_has_ended_says_so() -> None:
    buffer = moecomm.Buffer("self", hidden=H, num_experts=E, topk=K, max_tokens=T, dtype=torch.float32)
    buffer.abort()
    with pytest.raises(moecomm.Aborted):
        buffer.dispatch(torch.rand(T, H), torch.rand(T, E).topk(K).indices)
    assert repr(buffer).startswith("<moecomm.Buffer failed, ")
    buffer.close()
    assert repr(moecomm.Buffer.__new__(moecomm.Buffer)) == "<moecomm.Buffer, not open yet>"


def test_repr_of_what_operators_return_has_no_numbers_of_tensors() -> None:
    with moecomm.Buffer("self", hidden=H, num_experts=E, topk=K, max_tokens=T, dtype=torch.float32) as buffer:
        routed = moecomm.ops.dispatch(buffer, torch.rand(T, H), torch.rand(T, E).topk(K).indices, layout="flat")
        said = repr(routed)
        assert said.startswith(f"<moecomm.ops.Dispatched x=[{T}, {H}] torch.float32 cpu, tokens_per_expert=[{E}] ")
        assert f"handle=<moecomm.ops.Handle memory=[{len(routed.handle.memory)}] torch.uint8 cpu, " in said
        assert f"layout='flat', num_tokens={T}, " in said
        assert "tensor(" not in said and "\n" not in said
