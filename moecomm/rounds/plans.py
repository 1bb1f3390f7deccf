"""Plans of dispatches and combines: worked out for the first call of a kind, found again for later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from moecomm.errors import BadInput


class Plan(Protocol):
    """Calls with the same options, for tensors of the same types."""

    @property
    def kind(self) -> object:
        """kind_of() the tensors that the plan is for."""
        ...

    @staticmethod
    def kind_of(*tensors: Any) -> object:
        """The cheap part of a comparison of tensors: plans of another kind are passed over."""
        ...

    def schedule(self, num_tokens: int) -> None:
        """Prepare start() for rounds of so many tokens."""
        ...

    def start(self, *tensors: Any) -> Any:
        """A round that is ready to run, or None if the plan is not for these tensors."""
        ...


class PlanCache:
    """The plans of a Buffer.

    A key is a tuple of what a call asks for.  Dispatch and combine share the cache: their keys differ in length.

    Attributes:
        table: the plans by key, in which KnownCalls looks as well (csrc/bindings/known_calls.cpp).
    """

    def __init__(self) -> None:
        self.table: dict[tuple[Any, ...], list[Any]] = {}

    def start(self, key: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
        """A round by a plan that is there already, or None.

        Raises:
            BadInput: an option is a list, say, by which no plan can be found.
        """
        try:
            plans = self.table.get(key, ())
        except TypeError:
            check_hashable(key)
            raise
        # A plan that does not fit costs nearly as much as one that does.
        kind = plans[0].kind_of(*tensors) if len(plans) > 1 else None
        for plan in plans:
            if (kind is None or plan.kind == kind) and (started := plan.start(*tensors)) is not None:
                return started
        return None

    def start_checked(
        self, key: tuple[Any, ...], num_tokens: int, tensors: tuple[Any, ...], make: Callable[[], Plan]
    ) -> Any:
        """A round of tensors that have been checked, by a plan that `make` returns if there is none yet."""
        plans = self.table.setdefault(key, [])
        for plan in plans:
            plan.schedule(num_tokens)
            if (started := plan.start(*tensors)) is not None:
                return started
        plan = make()
        plan.schedule(num_tokens)
        started = plan.start(*tensors)
        assert started is not None, "tensors that were checked fit a plan made for them"
        plans.append(plan)
        return started

    def clear(self) -> None:
        """Forget all plans, which refer to the window."""
        self.table.clear()


def check_hashable(key: tuple[Any, ...]) -> None:
    """Raise BadInput that names the first option by which no plan can be found.

    A call that torch.compile traces is checked when it runs: torch 2.11 can't trace `hash`.
    """
    if torch.compiler.is_compiling():
        return
    asked = (getattr(part, "options", part) for part in key)  # those of a request
    for options in (part for part in asked if hasattr(part, "_asdict")):  # any other is what a caller gave
        for name, value in options._asdict().items():
            try:
                hash(value)
            except TypeError:
                raise BadInput(name, repr(value), "one value, and no list of them") from None
