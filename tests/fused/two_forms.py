"""Two forms of a layer for CPU ranks: the fused one is the unfused one by another name.  Times are from tables."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from moecomm.errors import Unsupported
from moecomm.fused import forms, layer, pipeline
from moecomm.fused.options import Options, Request
from moecomm.rounds.rounds import Rounds

Costs = dict[str, float]


class TwoForms:
    """Lets layers of CPU ranks have two forms.

    Args:
        set_attribute: as pytest.MonkeyPatch.setattr.
        costs: microseconds of each form on a rank, in a measurement; it may raise.

    Attributes:
        made: forms of the layers of each rank, in order.
        measurements: ranks, one for each measurement that has begun.
        even: ranks, one for each measurement that has begun again with even routing.
        capturing: captures are under way on all ranks.
        full: ranks without room for a full batch.
    """

    def __init__(self, set_attribute: Callable[..., None], costs: Callable[[int], Costs]) -> None:
        self.made: defaultdict[int, list[str]] = defaultdict(list)
        self.measurements: list[int] = []
        self.even: list[int] = []
        self.capturing, self.full = False, set[int]()
        self._costs, self._of_thread = costs, threading.local()
        for where, name, what in (
            (layer, "_why_unfused", lambda *about: ""),
            (layer, "_is_plain", lambda *about: False),  # else no pipeline is made
            (layer, "Fused", self._fused),
            (layer, "Unfused", self._unfused),
            (forms, "can_measure", lambda rounds: not rounds.masked and not self.capturing),
            (forms, "Clock", lambda device, head_start: self),
            (forms, "full_batch", self._batch_of(forms.full_batch)),
            (torch.cuda, "get_device_name", lambda device: "a GPU"),
        ):
            set_attribute(where, name, what)

    def forms_of(self, rank: int) -> list[str]:
        """Return the forms of the layers of a rank, and forget them."""
        return self.made.pop(rank, [])

    def _batch_of(self, full_batch: Callable[..., Any]) -> Callable[..., Any]:
        def batch(rounds: Rounds, kind: Any, even: bool) -> Any:
            self._of_thread.now = 0.0
            (self.even if even else self.measurements).append(rounds.rank)
            if rounds.rank in self.full:
                raise Unsupported("no memory")
            return full_batch(rounds, kind, even)

        return batch

    def _fused(self, rounds: Rounds, *tensors: Any, biases: Any, request: Any, others: Any, **how: Any) -> Any:
        x, ids, weights, _, w13, w2 = tensors
        options = Options(interleaved=how["interleaved"], max_rows=how["max_rows"], fused=False)
        asked = Request(options, request.gradients, request.layer)
        outputs = {"out": how["out"], "bias": how["bias"]}
        given: Any = layer.prepare(rounds, asked, x, ids, weights, w13, w2, *biases, **outputs)[0]
        call = given._dispatching
        given._dispatching = call._replace(request=call.request._replace(call="fused moe"))
        given.form = "fused"
        return given

    def _unfused(self, rounds: Rounds, *given: Any) -> pipeline.Unfused:
        forms = self

        class Noted(pipeline.Unfused):
            form = "unfused"

            def run_reduce(self) -> None:
                super().run_reduce()
                forms.made[rounds.rank].append(self.form)
                if getattr(forms._of_thread, "now", None) is not None:
                    forms._of_thread.now += forms._costs(rounds.rank)[self.form]

        return Noted(rounds, *given)

    # A clock that layers set forward.

    def delay(self) -> None:
        pass

    def mark(self) -> Any:
        return self._of_thread.now

    def us(self, begin: Any, end: Any) -> float:
        return float(end - begin)
