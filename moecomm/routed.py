"""What a dispatch hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import torch
from typing_extensions import TypeVar

from moecomm.core import shown
from moecomm.core.choices import Layout
from moecomm.errors import BadInput

if TYPE_CHECKING:
    from moecomm import _native
    from moecomm.buffer import Buffer
    from moecomm.dispatch.plan import Plan

# Types of the arrays of a Routed, by the options of its dispatch; see moecomm/core/overloads.py.
X_co = TypeVar("X_co", covariant=True, default=torch.Tensor)
Scales_co = TypeVar("Scales_co", covariant=True, default=torch.Tensor | None)
Flat_co = TypeVar("Flat_co", covariant=True, default=torch.Tensor | None)
ByExpert_co = TypeVar("ByExpert_co", covariant=True, default=torch.Tensor | None)


class Handle:
    """Where the tokens of one dispatch went: what combine, and a dispatch that repeats it, need.  Opaque.

    It holds on to window memory until it is gone; one handle serves any number of combines and repeats.
    """

    __slots__ = ("__weakref__", "args", "block", "buffer", "ended", "plan")

    def __init__(
        self, buffer: Buffer, plan: Plan, args: _native.DispatchArgs, block: _native.Block, ended: bool
    ) -> None:
        self.buffer, self.plan, self.args, self.block = buffer, plan, args, block
        self.ended = ended  # False from dispatch_begin to dispatch_end

    def __repr__(self) -> str:
        return shown.of_handle(self)

    @property
    def layout(self) -> Layout:
        """The layout of the dispatch."""
        return self.plan.layout

    @property
    def num_tokens(self) -> int:
        """How many tokens this rank passed to the dispatch."""
        return self.args.num_tokens

    @property
    def y_shape(self) -> tuple[int, ...]:
        """What combine's y must be."""
        return (*self.plan.rows_shape(self.args), self.args.hidden)


class Routed(Generic[X_co, Scales_co, Flat_co, ByExpert_co]):
    """The tokens that arrived at this rank's experts.  R ranks, K = topk, H = hidden, E = num_experts.

    Attributes:
        x: rows of the payload's dtype: `[rows, H]` (flat, expert) or `[E/R, rows, H]` (batched).
        scales: a row of scales beside each row of `x`, or None: `[rows, n]` (batched `[E/R, rows, n]`), of
            the dtype of the scales given; of `quantize="fp8"`: n = ceil(H / 128) of float32, or float8_e8m0fnu for
            "ue8m0".  With `scale_layout="column"` a column is contiguous, and the next begins `rows` rounded up to 4
            later; "ue8m0" is then int32 of four exponents each, the first in the lowest byte: n = ceil(H / 512).
        tokens_per_expert: int32 `[E/R]`, without padding, on the device.
        rows_per_expert: int64 `[E/R]`: the same, expert: rounded up to `expert_alignment`.
        num_rows: int32 `[1]`, on the device: flat: rows in use; expert: the end of the last group, padding included;
            batched: the sum of `tokens_per_expert`.  Rows past it are not initialised, but for
            `topk_idx` and `topk_weights`.
        src: int32 `[rows, 2]` (batched `[E/R, rows, 2]`): source rank and token of each row; -1, -1 in
            padding.
        topk_idx: flat: `[rows, K]` in the dtype of the ids given: this rank's expert, 0 to E/R - 1, or -1 where it
            is elsewhere.  With `max_rows` given and no `sync`, -1 in rows past `num_rows`, too.
        topk_weights: flat: float32 `[rows, K]`, 0 beside -1.
        row_weights: expert, batched: float32 `[rows]` (`[E/R, rows]`), the routing weight of each row, 0
            in padding.
        handle: for combine, and to repeat the dispatch.

    A tensor is made when it is first read.  What dispatch_begin returns can't be read before dispatch_end: BadInput.
    """

    __slots__ = ("__weakref__", "_tensors", "args", "back", "ended", "handle", "inputs", "payload", "plan", "sync")

    def __init__(
        self, handle: Handle, plan: Plan, args: _native.DispatchArgs, payload: _native.Block, ended: bool
    ) -> None:
        self.handle, self.plan, self.args, self.payload = handle, plan, args, payload
        self.ended = ended  # False from dispatch_begin to dispatch_end
        self.sync = False
        self.back: Any = None  # turns our tensors into the caller's kind of arrays; None: they are torch's
        self.inputs: Any = None  # alive until the executor has them
        self._tensors: dict[str, Any] = {}

    def __repr__(self) -> str:
        return shown.of_routed(self)

    @property
    def x(self) -> X_co:
        """See the class."""
        found: X_co = self._read("x")
        return found

    @property
    def scales(self) -> Scales_co:
        """See the class."""
        found: Scales_co = self._read("scales")
        return found

    @property
    def tokens_per_expert(self) -> X_co:
        """See the class."""
        found: X_co = self._read("tokens_per_expert")
        return found

    @property
    def rows_per_expert(self) -> X_co:
        """See the class."""
        found: X_co = self._read("rows_per_expert")
        return found

    @property
    def num_rows(self) -> X_co:
        """See the class."""
        found: X_co = self._read("num_rows")
        return found

    @property
    def src(self) -> X_co:
        """See the class."""
        found: X_co = self._read("src")
        return found

    @property
    def topk_idx(self) -> Flat_co:
        """See the class."""
        found: Flat_co = self._read("topk_idx")
        return found

    @property
    def topk_weights(self) -> Flat_co:
        """See the class."""
        found: Flat_co = self._read("topk_weights")
        return found

    @property
    def row_weights(self) -> ByExpert_co:
        """See the class."""
        found: ByExpert_co = self._read("row_weights")
        return found

    def _read(self, name: str) -> Any:
        if name not in self._tensors:
            if not self.ended:
                raise BadInput("routed", "what has only begun", "dispatch_end(routed) before a tensor of it is read")
            tensor = self.plan.tensor(name, self)
            self._tensors[name] = tensor if tensor is None or self.back is None else self.back(tensor)
        return self._tensors[name]
