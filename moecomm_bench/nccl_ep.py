"""NCCL EP on the same rows, where it is installed: low-latency and high-throughput, each in both of its layouts.

An exception becomes a row with the reason. A failed check of the library itself ends the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist

from moecomm.base.formats import FORMATS
from moecomm.errors import Unsupported
from moecomm_bench.case import GIVEN, QUANT_GROUP, RoundsCase
from moecomm_bench.clock import Timed
from moecomm_bench.exchange import by_expert, by_rank, nccl_group
from moecomm_bench.nccl_ep_library import (
    API_VERSION,
    CAST_FORWARD,
    CAST_INSIDE,
    EXPERT_MAJOR,
    FLAT,
    HIGH_THROUGHPUT,
    LOW_LATENCY,
    NAME,
    WINDOWS_ONLY,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    GroupConfig,
    LayoutInfo,
    Library,
    NcclEpTensor,
    NcclEpWindow,
)
from moecomm_bench.ours import Input, Ours, cast_before

_UNIT = 16  # bytes of which rows and their scales are multiples
_CAST_COLUMNS = 512  # of which rows that low-latency casts are a multiple
_SMS = 16  # the library's default for high throughput
_MORE_SMS = (32, 64, 128)  # with which high throughput runs as well


@dataclass(frozen=True)
class Mode:
    """An algorithm of NCCL EP and a layout of its rows.

    Attributes:
        ours: the layout of moecomm with the same rows.
        most_tokens: of a rank.
    """

    algorithm: int
    layout: int
    ours: str
    most_tokens: int

    @property
    def low_latency(self) -> bool:
        return self.algorithm == LOW_LATENCY

    @property
    def expert_major(self) -> bool:
        return self.layout == EXPERT_MAJOR

    def takes(self, case: RoundsCase, payload: str) -> bool:
        """Return True for bf16 and fp8, and for given rows that have scales: the library forwards the bytes of both."""
        fmt = FORMATS.get(payload.removesuffix(GIVEN))
        if payload == "bf16" or fmt is None:
            return payload == "bf16"
        if payload == "fp8" and self.low_latency:
            return case.hidden % _CAST_COLUMNS == 0
        given = payload == "fp8" or payload.endswith(GIVEN)
        return given and fmt.scales is not None and fmt.row_bytes(case.hidden) % _UNIT == 0

    def check(self, case: RoundsCase) -> None:
        """Raise Unsupported for sizes that the library does not take: it would end the process."""
        local = case.experts // case.ranks
        if self.low_latency and case.hidden % 128:
            raise Unsupported(f"{NAME}: low-latency takes a multiple of 128 columns, not {case.hidden}")
        if not self.low_latency and case.experts % 4:
            raise Unsupported(f"{NAME}: high throughput takes a multiple of 4 experts, not {case.experts}")
        if not self.low_latency and self.expert_major and local & (local - 1):
            raise Unsupported(f"{NAME}: expert-major takes a power of two of experts a rank, not {local}")


MODES = {
    f"{NAME} low-latency": Mode(LOW_LATENCY, EXPERT_MAJOR, "batched", 512),
    NAME: Mode(HIGH_THROUGHPUT, FLAT, "flat", 8192),
    f"{NAME} expert-major": Mode(HIGH_THROUGHPUT, EXPERT_MAJOR, "expert", 8192),
}


class NcclEP:
    """Groups of NCCL EP, one at a time: opened for a mode and a size, closed when the next is opened. Collective."""

    def __init__(self, case: RoundsCase) -> None:
        self._case = case
        self._open: NcclEpGroup | None = None

    @cached_property
    def library(self) -> Library:
        """The library; loaded when it is first called, because that may fail."""
        return Library()

    @cached_property
    def _ranks(self) -> dist.ProcessGroup:
        return nccl_group()

    def ways(self) -> dict[str, Callable[[Ours], list[Timed]]]:
        """Return the modes by name, high throughput with several numbers of SMs.

        Each returns the timed calls for the size of `ours`.  One that fails leaves the rows of the others.
        """
        found: dict[str, Callable[[Ours], list[Timed]]] = {}
        for name, mode in MODES.items():
            if mode.ours in self._case.layouts:
                found[name] = partial(self._calls, name, mode, 0)
                if not mode.low_latency:
                    found |= {f"{name} {sms} SMs": partial(self._calls, name, mode, sms) for sms in _MORE_SMS}
        return found

    def rounds(self, mode: Mode, inputs: list[Input], sms: int = 0) -> list[NcclEpRound]:
        """Return the rounds of a mode, one for each input; with `sms` 0 by the library's number of SMs."""
        if self._open is not None:
            self._open.close()
            self._open = None
        self._open = NcclEpGroup(self.library, self._ranks, mode, self._case, inputs, sms)
        return [NcclEpRound(self._open, given) for given in inputs]

    def _calls(self, name: str, mode: Mode, sms: int, ours: Ours) -> list[Timed]:
        if ours.tokens > mode.most_tokens:
            return []
        mode.check(self._case)
        rounds = self.rounds(mode, ours.inputs, sms)
        for one in rounds:
            one.dispatch("bf16")  # leaves the rows that combine returns
        used = 0 if mode.low_latency else sms or _SMS
        about = {"who": name, "layout": mode.ours, "sms": used, "version": self.library.version}
        found = [
            Timed({"what": "dispatch", "payload": payload, **about}, [partial(one.dispatch, payload) for one in rounds])
            for payload in self._case.payloads
            if mode.takes(self._case, payload)
        ]
        # Dispatch sends a row to a rank once, and copies it there; so does combine but for low-latency expert-major.
        each = mode.low_latency and mode.expert_major
        combines = [one.combine for one in rounds]
        return [*found, Timed({"what": "combine", "payload": "", **about}, combines, by_expert=each)]


class NcclEpGroup:
    """A group of NCCL EP, with the windows and handles that are opened in it. Collective.

    High throughput writes to windows of the caller and copies nothing; room is for the rows that arrive, known in
    advance here.
    """

    def __init__(
        self,
        library: Library,
        ranks: dist.ProcessGroup,
        mode: Mode,
        case: RoundsCase,
        inputs: list[Input],
        sms: int,
    ) -> None:
        self.library, self.mode, self.case, self._ranks = library, mode, case, ranks
        self.device, tokens = inputs[0].x.device, len(inputs[0].x)
        # High throughput copies its plan, an int32 for each (token, rank), in units of 16 bytes.
        self.tokens = tokens if mode.low_latency else -(-tokens // 4) * 4
        self.rows = max(self.tokens, self._most_rows(inputs))
        self._comm = ctypes.c_void_p(_communicator(ranks, self.device))
        self._windows: list[NcclEpWindow] = []
        self._handles: list[ctypes.c_void_p] = []
        config = GroupConfig(
            version=API_VERSION,
            algorithm=mode.algorithm,
            num_experts=case.experts,
            max_dispatch_tokens_per_rank=self.tokens,
            max_recv_tokens_per_rank=0 if mode.low_latency else self.rows,
            max_token_bytes=2 * case.hidden,
            max_num_sms=sms,
            zero_copy=0 if mode.low_latency else WINDOWS_ONLY,
            num_topk=case.topk,
        )
        self._pointer = ctypes.c_void_p()
        library("ncclEpCreateGroup", ctypes.byref(self._pointer), self._comm, ctypes.byref(config))

    def tensor(self, *shape: int, dtype: torch.dtype) -> NcclEpTensor:
        """Allocate memory of this rank."""
        return NcclEpTensor.of(torch.empty(shape, dtype=dtype, device=self.device))

    def slots_of(self, *columns: int, dtype: torch.dtype, window: bool = False) -> NcclEpTensor:
        """Allocate a tensor with a slot for each row that can arrive; in a window, other ranks can store to it."""
        shape = (*self._slots(), *columns)
        if not window:
            return self.tensor(*shape, dtype=dtype)
        self._windows.append(NcclEpWindow(self.library, self._comm, shape, dtype, self.device))
        return self._windows[-1].described

    def _slots(self) -> tuple[int, ...]:
        if not self.mode.low_latency:
            return (self.rows,)
        if self.mode.expert_major:
            return self.case.experts // self.case.ranks, self.case.ranks * self.tokens
        return self.case.ranks, self.tokens

    def handle(self, topk_idx: NcclEpTensor, info: LayoutInfo | None) -> ctypes.c_void_p:
        """Create a handle for a routing."""
        made = ctypes.c_void_p()
        about = None if info is None else ctypes.byref(info)
        given = (self._pointer, self.mode.layout, ctypes.byref(topk_idx), about, None, self.stream())
        self.library("ncclEpCreateHandle", ctypes.byref(made), *given)
        self._handles.append(made)
        return made

    def stream(self) -> ctypes.c_void_p | None:
        """Return the current stream."""
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream) if self.device.type == "cuda" else None

    def close(self) -> None:
        """Destroy the group and what was opened in it, once no rank uses it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(self._ranks)
        for handle in self._handles:
            self.library("ncclEpHandleDestroy", handle)
        for window in self._windows:
            window.close()
        self.library("ncclEpGroupDestroy", self._pointer)

    def _most_rows(self, inputs: list[Input]) -> int:
        """Return the most rows that an input brings to a rank."""
        sizes = (self.case.experts, self.case.ranks)
        to = by_expert if self.mode.expert_major else by_rank
        counts = [(to(given.topk_idx, *sizes).flatten() + 1).bincount(minlength=sizes[1] + 1)[1:] for given in inputs]
        arriving = torch.stack(counts)
        dist.all_reduce(arriving, group=self._ranks)
        return int(arriving.max())


class NcclEpRound:
    """A dispatch and its combine on one input. Collective.

    Attributes:
        rows, scales: what each payload brings; combine returns the rows of bf16.
        counts: rows that have arrived, by local expert.
        out: the sums that combine brings home.
    """

    def __init__(self, group: NcclEpGroup, given: Input) -> None:
        self._group, self._mode, case = group, group.mode, group.case
        self._topk_idx, self._weights = NcclEpTensor.of(given.topk_idx), NcclEpTensor.of(given.topk_weights)
        self.counts = group.tensor(case.experts // case.ranks, dtype=torch.int32)
        self._info = LayoutInfo(expert_counters=self.counts)
        self._handle = group.handle(self._topk_idx, None if self._mode.low_latency else self._info)
        self.rows: dict[str, NcclEpTensor] = {}
        self.scales: dict[str, NcclEpTensor] = {}
        self._dispatches = {"bf16": self._dispatch_of(given.x)}
        for payload in case.payloads:
            if payload != "bf16" and self._mode.takes(case, payload):
                inside = payload == "fp8" and self._mode.low_latency
                self._dispatches[payload] = (
                    self._dispatch_and_cast(given.x) if inside else self._dispatch_of_cast(given.x, payload)
                )
        self.out = torch.empty_like(given.x)
        weights = {"topk_weights": self._weights} if self._mode.low_latency and self._mode.expert_major else {}
        self._y = CombineInputs(tokens=self.rows["bf16"])
        self._sums = CombineOutputs(tokens=NcclEpTensor.of(self.out), **weights)

    def dispatch(self, payload: str) -> None:
        """Send rows. For high throughput, whose handle has the plan of a routing, the plan is part of the time."""
        call, stream, info = self._group.library, self._group.stream(), ctypes.byref(self._info)
        if not self._mode.low_latency:
            call("ncclEpUpdateHandle", self._handle, ctypes.byref(self._topk_idx), info, stream)
        given, arrived, config = map(ctypes.byref, self._dispatches[payload])
        call("ncclEpDispatch", self._handle, given, arrived, info if self._mode.low_latency else None, config, stream)

    def combine(self) -> torch.Tensor:
        """Return the rows of bf16 and add them."""
        structs = (ctypes.byref(self._y), ctypes.byref(self._sums), None)
        self._group.library("ncclEpCombine", self._handle, *structs, self._group.stream())
        return self.out

    def _dispatch_of(self, x: torch.Tensor) -> tuple[DispatchInputs, DispatchOutputs, DispatchConfig]:
        self.rows["bf16"] = self._group.slots_of(x.shape[1], dtype=x.dtype, window=not self._mode.low_latency)
        given = DispatchInputs(tokens=NcclEpTensor.of(x), **self._sent())
        return given, DispatchOutputs(tokens=self.rows["bf16"], **self._arriving()), DispatchConfig()

    def _dispatch_and_cast(self, x: torch.Tensor) -> tuple[DispatchInputs, DispatchOutputs, DispatchConfig]:
        """Let low-latency cast the rows to fp8."""
        self.rows["fp8"] = self._group.slots_of(x.shape[1], dtype=torch.float8_e4m3fn)
        self.scales["fp8"] = self._group.slots_of(x.shape[1] // QUANT_GROUP, dtype=torch.float32)
        arriving = DispatchOutputs(tokens=self.rows["fp8"], scales=self.scales["fp8"], **self._arriving())
        given = DispatchInputs(tokens=NcclEpTensor.of(x), **self._sent())
        return given, arriving, DispatchConfig(quant_recipe=CAST_INSIDE)

    def _dispatch_of_cast(
        self, x: torch.Tensor, payload: str
    ) -> tuple[DispatchInputs, DispatchOutputs, DispatchConfig]:
        """Forward rows that are cast in advance, as for DeepEP, with their scales."""
        window, (cast, scales) = not self._mode.low_latency, forwarded(x, payload)
        self.rows[payload] = self._group.slots_of(cast.shape[1], dtype=cast.dtype, window=window)
        self.scales[payload] = self._group.slots_of(scales.shape[1], dtype=scales.dtype, window=window)
        arriving = DispatchOutputs(tokens=self.rows[payload], scales=self.scales[payload], **self._arriving())
        given = DispatchInputs(tokens=NcclEpTensor.of(cast), scales=NcclEpTensor.of(scales), **self._sent())
        return given, arriving, DispatchConfig(quant_recipe=CAST_FORWARD)

    def _sent(self) -> dict[str, NcclEpTensor]:
        return {} if self._mode.low_latency and self._mode.expert_major else {"topk_weights": self._weights}

    def _arriving(self) -> dict[str, NcclEpTensor]:
        """Make room for what arrives beside rows."""
        room, topk = self._group.slots_of, self._group.case.topk
        if self._mode.expert_major:
            return {} if self._mode.low_latency else {"topk_weights": room(dtype=torch.float32)}
        ids = torch.int32 if self._mode.low_latency else torch.int64
        return {"topk_weights": room(topk, dtype=torch.float32), "topk_idx": room(topk, dtype=ids)}


def forwarded(x: torch.Tensor, payload: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and scales of a payload in dtypes that the library forwards.

    Its rows cannot be int8, so these are called e4m3; it copies bytes. Scales are padded to a multiple of 16 bytes.
    """
    rows, scales = cast_before(x, payload)
    assert scales is not None
    rows = rows.view(torch.float4_e2m1fn_x2 if rows.dtype == torch.uint8 else torch.float8_e4m3fn)
    if scales.itemsize == 1:
        scales = scales.view(torch.uint8)
    missing = -scales.shape[1] % (_UNIT // scales.itemsize)
    return rows, torch.nn.functional.pad(scales, (0, missing)) if missing else scales


def _communicator(ranks: dist.ProcessGroup, device: torch.device) -> int:
    """Return the address of the ranks' ncclComm, which their first collective creates."""
    dist.all_reduce(torch.zeros(1, device=device), group=ranks)
    address: int = ranks._get_backend(device)._comm_ptr()  # type: ignore[attr-defined]
    return address
