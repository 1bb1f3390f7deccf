"""The C interface of NCCL EP by ctypes: its structs, and calls that raise.

Written for API version 2 of nccl_ep.h (NVIDIA/nccl-extensions, library 0.2.0), which NCCL 2.30.7 can run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from moecomm.errors import Unsupported

NAME = "nccl_ep"
LOW_LATENCY, HIGH_THROUGHPUT = 0, 1  # ncclEpAlgorithm_t
EXPERT_MAJOR, FLAT = 1, 3  # ncclEpLayout_t; its rank-major rows were sometimes wrong on two H100s
CAST_FORWARD, CAST_INSIDE = 1, 2  # ncclEpDispQuant_t: rows with their scales; DeepSeek's cast, of low-latency alone
WINDOWS_ONLY = 2  # ncclEpZeroCopyMode_t: no staging buffers
API_VERSION = 2

_FILE = "libnccl_ep.so"
_MAGIC, _TENSOR_MAGIC = 0xC00FFFEE, 0xCAFECAFE
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_DTYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float32: 7,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
    torch.float4_e2m1fn_x2: 12,
}  # ncclDataType_t
_Fields = Sequence[tuple[str, Any]]


def _uints(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_uint) for name in names]


class NcclEpTensor(ctypes.Structure):
    """ncclEpTensor_t. Keeps the memory that it describes."""

    _fields_: ClassVar[_Fields] = (
        *_uints("size", "magic", "ndim", "datatype"),
        ("data", ctypes.c_void_p),
        ("window", ctypes.c_void_p),
        ("window_offset", ctypes.c_uint64),
        ("sizes", ctypes.POINTER(ctypes.c_size_t)),
    )
    held: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor, window: int | None = None) -> NcclEpTensor:
        """Describe a contiguous tensor, which may be the start of a registered window."""
        sizes = (ctypes.c_size_t * tensor.dim())(*tensor.shape)
        head = (ctypes.sizeof(cls), _TENSOR_MAGIC, tensor.dim(), _DTYPES[tensor.dtype])
        made = cls(*head, tensor.data_ptr(), window, 0, sizes)
        made.held = tensor
        return made


class _Sized(ctypes.Structure):
    """A struct that begins with its size and a magic number. Takes its other members by name; tensors by reference."""

    def __init__(self, **members: Any) -> None:
        given = {name: ctypes.pointer(one) if isinstance(one, NcclEpTensor) else one for name, one in members.items()}
        super().__init__(size=ctypes.sizeof(self), magic=_MAGIC, **given)


def _tensors(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.POINTER(NcclEpTensor)) for name in names]


class GroupConfig(_Sized):
    """ncclEpGroupConfig_t. A member that is left out is chosen by the library."""

    _fields_: ClassVar[_Fields] = (
        *_uints("size", "magic", "version", "algorithm", "num_experts", "max_dispatch_tokens_per_rank"),
        *_uints("max_recv_tokens_per_rank", "max_token_bytes"),
        ("rdma_buffer_size", ctypes.c_ulong),
        *_uints("num_qp_per_rank", "num_channels", "max_num_sms"),
        ("alloc", ctypes.c_void_p * 3),
        *_uints("enable_mask"),
        ("timeout_ns", ctypes.c_uint64),
        *_uints("zero_copy", "overflow_policy", "num_topk", "padding"),
    )


class LayoutInfo(_Sized):
    """ncclEpLayoutInfo_t."""

    _fields_: ClassVar[_Fields] = (
        *_uints("size", "magic"),
        *_tensors("expert_counters", "src_rank_counters", "expert_offsets", "recv_total_counter"),
        *_uints("recv_topk_idx_kind", "padding"),
    )


class DispatchInputs(_Sized):
    """ncclEpDispatchInputs_t."""

    _fields_: ClassVar[_Fields] = (*_uints("size", "magic"), *_tensors("tokens", "topk_weights", "scales"))


class DispatchOutputs(_Sized):
    """ncclEpDispatchOutputs_t."""

    _fields_: ClassVar[_Fields] = (*_uints("size", "magic"), *_tensors("tokens", "topk_weights", "scales", "topk_idx"))


class DispatchConfig(_Sized):
    """ncclEpDispatchConfig_t."""

    _fields_: ClassVar[_Fields] = _uints("size", "magic", "send_only", "round_scales", "pass_direction", "quant_recipe")


class CombineInputs(_Sized):
    """ncclEpCombineInputs_t."""

    _fields_: ClassVar[_Fields] = (*_uints("size", "magic"), *_tensors("tokens", "topk_weights", "scales"))


class CombineOutputs(_Sized):
    """ncclEpCombineOutputs_t."""

    _fields_: ClassVar[_Fields] = (*_uints("size", "magic"), *_tensors("tokens", "topk_weights"))


class Library:
    """NCCL EP, and the calls of NCCL that it needs. A call by name raises if its status is not ncclSuccess."""

    def __init__(self) -> None:
        try:
            self._functions = ctypes.CDLL(_FILE)
        except OSError as error:
            raise Unsupported(f"{NAME}: {error}") from None
        self._functions.ncclGetErrorString.restype = ctypes.c_char_p
        code = ctypes.c_int()
        self("ncclEpGetVersion", ctypes.byref(code))
        self.version = f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100} (API {API_VERSION})"
        self("ncclGetVersion", ctypes.byref(code))
        if code.value < 23000:
            raise Unsupported(f"{NAME}: NCCL is older than 2.30")

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self._functions, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: {self._functions.ncclGetErrorString(status).decode()}")


class NcclEpWindow:
    """Memory of a rank that the ranks of a communicator load and store. Collective.

    Attributes:
        tensor: the memory.
        described: the same for NCCL EP.
    """

    def __init__(
        self, library: Library, comm: ctypes.c_void_p, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._library, self._comm = library, comm
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        self._memory, self._window = ctypes.c_void_p(), ctypes.c_void_p()
        size = ctypes.c_size_t(nbytes)
        library("ncclMemAlloc", ctypes.byref(self._memory), size)
        library("ncclCommWindowRegister", comm, self._memory, size, ctypes.byref(self._window), _SYMMETRIC)
        if self._window.value is None:
            raise Unsupported(f"{NAME}: this NCCL registers no symmetric window here")
        assert self._memory.value is not None
        self.tensor = _bytes_at(self._memory.value, nbytes, device).view(dtype).view(shape)
        self.described = NcclEpTensor.of(self.tensor, self._window.value)

    def close(self) -> None:
        """Free the memory; no rank may use it any more."""
        self._library("ncclCommWindowDeregister", self._comm, self._window)
        self._library("ncclMemFree", self._memory)


def _bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    words = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=words), device=device)
