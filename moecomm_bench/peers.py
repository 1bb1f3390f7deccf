"""Rows of other libraries on the same input in the same run. A failure becomes a row with the reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moecomm.errors import Unsupported
from moecomm.tools.progress import Step
from moecomm_bench import deep_ep, flashinfer, nccl_ep, nccl_ep_library
from moecomm_bench.case import RoundsCase
from moecomm_bench.clock import Call, Clock, Rotation, Timed
from moecomm_bench.exchange import Collective
from moecomm_bench.ours import Ours
from moecomm_bench.ranks import together
from moecomm_bench.singles import Singles


class OtherLibraries:
    """The libraries that can run here. Collective, as is every call.

    Attributes:
        versions: of those that torch does not bring, by name.
    """

    def __init__(
        self, case: RoundsCase, group: dist.ProcessGroup, device: torch.device, singles: Singles | None = None
    ) -> None:
        self._case, self._group, self._device, self._singles = case, group, device, singles
        self._collective = Collective(case, group, device)
        self._ways: dict[str, Callable[[Ours], list[Timed]]] = {self._collective.name: self._collective.calls}
        self._failed: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        module, why = together(group, deep_ep.module) if device.type == "cuda" else (None, f"not for {device.type}")
        if module is not None:
            self._ways |= deep_ep.DeepEP(case, module).ways()
            self.versions[deep_ep.NAME] = str(module.__version__)
        elif deep_ep.NAME in case.others:
            self._ways[deep_ep.NAME] = partial(_absent, deep_ep.NAME, why)
        if nccl_ep_library.NAME in case.others:
            self._ways |= nccl_ep.NcclEP(case).ways()
        if flashinfer.NAME in case.others:
            self._ways |= flashinfer.FlashInfer(case).ways()

    @property
    def count(self) -> int:
        """Number of interfaces, for the progress bar."""
        return len(self._ways)

    def rows(self, ours: Ours, step: Step) -> list[dict[str, Any]]:
        """Measure all libraries at the size of `ours`; one that has failed is not measured again."""
        found = []
        for name, calls in self._ways.items():
            step(name)
            if name not in self._failed:
                found += self._rows(name, calls, ours)
        return found

    def _rows(self, name: str, calls: Callable[[Ours], list[Timed]], ours: Ours) -> list[dict[str, Any]]:
        about: dict[str, Any] = {"who": name, "tokens": ours.tokens, "sms_asked": 0, "variant": ""}
        found: list[dict[str, Any]] = []
        calls_here, why = together(self._group, partial(calls, ours))
        for timed in calls_here or []:
            # Run once before the Clock, so that a failure does not leave other ranks waiting there.
            _, why = together(self._group, partial(self._try, timed))
            if why:
                break
            times, why = together(self._group, partial(self._time, timed, ours))
            if why:
                break
            if "version" in timed.about:
                self.versions[name.partition(" ")[0]] = timed.about["version"]
            found.append({**about, **timed.about, **bytes_of(self._case, ours, timed), **times})
        if why:
            self._failed[name] = why
            blank = {"what": "", "layout": "", "payload": "", "sms": 0}
            found.append({**about, **blank, "why": why})
        return found

    def _try(self, timed: Timed) -> None:
        for call in timed.calls:
            call()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _time(self, timed: Timed, ours: Ours) -> dict[str, Any]:
        graph = timed.graph and self._case.mode == "graph"
        chain = -(-ours.clock.chain // timed.period) * timed.period
        mode: dict[str, Any] = {"cold": self._case.cold, "chain": chain, "replays": self._case.replays}
        clock = Clock(self._group, self._device, graph=graph, **mode)
        call = Rotation(timed.calls)
        meet = partial(_repeat, call, timed.period)
        found: dict[str, Any] = {"us": clock(call, meet), "host_us": clock.host_us(call)}
        if self._singles is not None:
            if self._case.mode == "graph":  # of one that can't be captured, `us` again
                found["eager_us"] = Clock(self._group, self._device, graph=False, **mode)(call, meet)
            found["alone_us"] = self._singles(timed.calls, graph, timed.period)
        return found


def _repeat(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def _absent(name: str, why: str, ours: Ours) -> list[Timed]:
    raise Unsupported(f"{name}: {why}")


def bytes_of(case: RoundsCase, ours: Ours, timed: Timed) -> dict[str, float]:
    """Return the bytes of another library's row: `wire` and `busiest` as of ours, `moved` by the rows that it sends."""
    about, traffic = timed.about, ours.traffic
    parts = ("dispatch", "combine") if about["what"] == "pair" else (about["what"],)
    row = sum(case.wire_bytes(part, about["payload"]) for part in parts)
    return {
        "wire_bytes": traffic.wire() * row,
        "busiest_bytes": ours.busiest * row,
        "moved_bytes": traffic.wire(by_expert=timed.by_expert) * row,
        "logical_bytes": traffic.logical(about["layout"]) * row,
    }
