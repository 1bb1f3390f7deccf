"""Calls of a Window between GPUs: kernels of one block on the current stream."""

from __future__ import annotations

import torch

from moecomm import _native
from moecomm.backends.gpu_peers import CONTROL, GpuPeers
from moecomm.gpu import cuda_driver, plain_kernel
from moecomm.gpu.structs import struct
from moecomm.ranks.peers import Peers

_THREADS = 64  # a thread for each rank of a barrier


def kernel(call: str) -> plain_kernel.PlainKernel:
    """Return the kernel of a call: "signal", "set_signal", "wait" or "barrier"."""
    return plain_kernel.PlainKernel("window/calls", f"window_{call}", "WindowCallArgs", _THREADS)


class GpuCalls:
    """Kernels and copies of moecomm.window.calls.WindowCalls.

    The peers have CONTROL bytes of control memory more than they use.
    """

    def __init__(self, peers: GpuPeers, handle: _native.WindowHandle) -> None:
        self._peers, self._handle = peers, handle
        self._device = peers.device
        self.pointers = torch.tensor(peers.addresses, dtype=torch.int64).to(peers.device)
        handle.peers = handle.control = self.pointers.data_ptr()
        self._on_device = torch.frombuffer(bytearray(handle.content), dtype=torch.uint8).to(peers.device)
        self.handle_address = self._on_device.data_ptr()
        torch.cuda.synchronize(peers.device)  # kernels of any stream may read all of it
        self._struct = struct("Window").from_buffer_copy(handle.content)
        self._functions = {  # now: loading waits for kernels that are running
            call: plain_kernel.load(kernel(call), peers.device.index)
            for call in ("signal", "set_signal", "wait", "barrier")
        }

    def _launch(self, call: str, value: int = 0, rank: int = 0, index: int = 0) -> None:
        device = self._device.index
        args = struct("WindowCallArgs")(window=self._struct, value=value, rank=rank, index=index)
        if _native.cuda_context() == 0:  # autograd's threads may have none yet
            cuda_driver.bind_thread(device)
        how = 1, _THREADS, 0, _native.current_stream(device), args
        if torch.cuda.current_device() == device:
            _native.cuda_launch_packed(self._functions[call], *how)
            return
        with torch.cuda.device(device):
            _native.cuda_launch_packed(self._functions[call], *how)

    def signal(self, rank: int, index: int, amount: int) -> None:
        self._launch("signal", amount, rank, index)

    def set_signal(self, rank: int, index: int, value: int) -> None:
        self._launch("set_signal", value, rank, index)

    def signal_value(self, index: int) -> int:
        address = self._peers.addresses[self._handle.rank] + self._handle.signals + 8 * index
        torch.cuda.current_stream(self._device).synchronize()
        return int.from_bytes(self._read(address, 8), "little")

    def wait(self, index: int, value: int, peer: int) -> bool:
        self._launch("wait", value, peer, index)
        return True

    def barrier(self) -> bool:
        self._launch("barrier")
        return True

    def abort_word(self) -> int:
        return _native.read_word(self._handle.abort_host)

    def abort(self, cause: int) -> None:
        rank = self._handle.rank
        self._peers.abort(cause, rank)
        word = self.abort_word().to_bytes(4, "little")
        self._write([address + self._handle.abort for address in self._peers.addresses], word)

    def capturing(self) -> bool:
        cuda_driver.bind_thread(self._device.index)
        return _native.cuda_capturing(_native.current_stream(self._device.index))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def leave(self) -> None:
        at = self._handle.left + 4 * self._handle.rank
        self._write([address + at for address in self._peers.addresses], (1).to_bytes(4, "little"))

    def _write(self, addresses: list[int], word: bytes) -> None:
        """Write a word to memory of several ranks, on a stream of its own."""
        cuda_driver.bind_thread(self._device.index)
        pinned = self._peers.control.write(CONTROL, word)
        for address in addresses:
            self._peers.copies.to_device(address, pinned, len(word))
        self._peers.copies.wait()

    def _read(self, address: int, nbytes: int) -> bytes:
        cuda_driver.bind_thread(self._device.index)
        self._peers.copies.to_host(self._peers.control.address + CONTROL, address, nbytes)
        self._peers.copies.wait()
        return self._peers.control.read(CONTROL, nbytes)


def calls_of(peers: Peers, handle: _native.WindowHandle) -> GpuCalls:
    """Return the calls on the memory of GPUs."""
    assert isinstance(peers, GpuPeers)
    with torch.cuda.device(peers.device):
        return GpuCalls(peers, handle)
