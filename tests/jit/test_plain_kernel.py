"""Where a kernel is launched: on the device that it is for, by a thread that may have no context yet."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moecomm import _native
from moecomm.gpu import cuda_driver, plain_kernel, row_pass


@pytest.mark.parametrize(("context", "current"), [(77, 1), (0, 1), (77, 0)])
def test_a_launch_is_on_the_device_it_is_for(monkeypatch: pytest.MonkeyPatch, context: int, current: int) -> None:
    done: list[object] = []
    device = [current]

    @contextmanager
    def entered(wanted: torch.device) -> Iterator[None]:
        device.append(wanted.index)
        yield
        device.pop()

    monkeypatch.setattr(_native, "cuda_context", lambda: context)
    monkeypatch.setattr(cuda_driver, "bind_thread", lambda index: done.append(f"bind {index}"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[-1])
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(plain_kernel, "load", lambda kernel, index: 1000 + index)
    monkeypatch.setattr(_native, "current_stream", lambda index: 10 + index)
    monkeypatch.setattr(_native, "cuda_launch_packed", lambda *launch: done.append(launch))
    args = ctypes.c_uint64(5)
    plain_kernel.launch_on(torch.device("cuda", 1), row_pass.kernel("zero_padding", "u8"), 3, args)  # type: ignore[arg-type]
    assert done == [*(["bind 1"] if context == 0 else []), (1001, 3, 256, 0, 11, args, False)]
    assert device == [current]
