"""The tensors that a dispatch returns, and the handle that combine takes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import torch
from typing_extensions import TypeVar

from moecomm import _native
from moecomm.base.bound import Bound
from moecomm.base.choices import Layout
from moecomm.errors import BadInput
from moecomm.rounds.rounds import Rounds

# Types of the arrays of a Routed, by the options of its dispatch; see signatures.py.
X_co = TypeVar("X_co", covariant=True, default=torch.Tensor)
Scales_co = TypeVar("Scales_co", covariant=True, default=torch.Tensor | None)
Flat_co = TypeVar("Flat_co", covariant=True, default=torch.Tensor | None)
ByExpert_co = TypeVar("ByExpert_co", covariant=True, default=torch.Tensor | None)


WHOLE, BEGIN, END = (int(part) for part in (_native.Part.whole, _native.Part.begin, _native.Part.end))


class DispatchPlan:
    """The plan of a dispatch, as its outputs see it: moecomm.dispatch.plan.Plan, or one that stands for it.

    Groups of tensors come one by one from tensor(), unless a class has them in one step.

    Attributes:
        base: address of this rank's window.
        owner: of the window's memory.
        rows_shape: returns `[rows]`, or `[E/R, rows of each]` (batched).
        run: runs a dispatch, or half of one, on the executor.
        record: enters a call into the flight recorder; returns its number there.
        trim: frees the memory of rows that did not arrive.
        tensor: returns a tensor of Routed, by its name there.
        rows_tensor: returns x as it arrived, also where rows are bytes.
    """

    layout: Layout
    base: int
    topk: int
    local_experts: int
    x_dtype: torch.dtype
    scales_dtype: torch.dtype | None
    device: torch.device
    owner: object
    rows_shape: Callable[[_native.DispatchArgs], tuple[int, ...]]
    run: Callable[[_native.DispatchArgs], None]
    record: Callable[[_native.DispatchArgs], int]
    trim: Callable[[Any, int], None]
    tensor: Callable[[str, Any], torch.Tensor | None]
    rows_tensor: Callable[[Any], torch.Tensor]

    def flat_tensors(self, routed: Any) -> tuple[Any, ...]:
        """Return x, scales, topk_idx and topk_weights of a flat dispatch.  Scales were given, by row."""
        return tuple(self.tensor(name, routed) for name in ("x", "scales", "topk_idx", "topk_weights"))

    def expert_tensors(self, routed: Any, *, counted: bool = False) -> tuple[Any, ...]:
        """Return x, scales and row_weights of an expert dispatch; `counted`: and rows_per_expert."""
        names = ("x", "scales", "row_weights", *(("rows_per_expert",) if counted else ()))
        return tuple(self.tensor(name, routed) for name in names)

    def layer_tensors(self, routed: Any) -> tuple[Any, ...]:
        """Return x, scales and tokens_per_expert of an expert dispatch, as given or cast to FP8."""
        return tuple(self.tensor(name, routed) for name in ("x", "scales", "tokens_per_expert"))

    def batched_tensors(self, routed: Any, *, scaled: bool = False) -> tuple[Any, ...]:
        """Return x and tokens_per_expert of a batched dispatch, arrived or not; `scaled`: and scales."""
        names = ("x", "tokens_per_expert", *(("scales",) if scaled else ()))
        return tuple(self.tensor(name, routed) for name in names)

    def table_tensors(self, routed: Any) -> tuple[Any, ...]:
        """Return topk_weights (flat) or row_weights, src, tokens_per_expert, num_rows, and topk_idx or None."""
        names = ("topk_weights" if self.layout == "flat" else "row_weights", "src", "tokens_per_expert")
        return tuple(self.tensor(name, routed) for name in (*names, "num_rows", "topk_idx"))


class Handle(Bound):
    """The routing of one dispatch: the input of combine, and of a dispatch that repeats it.  Opaque.

    It keeps its part of the window until it is gone.  One handle serves any number of combines and repeats.
    """

    __slots__ = ("__weakref__", "args", "block", "plan", "rounds", "weights_read")
    _instead = "topk_idx and topk_weights, and dispatch again"

    def __init__(self, rounds: Rounds, plan: DispatchPlan, args: _native.DispatchArgs, block: _native.Block) -> None:
        self.rounds, self.plan, self.args, self.block = rounds, plan, args, block
        # Routed.row_weights, once a caller has read them, with their address and version then.
        self.weights_read: tuple[weakref.ref[torch.Tensor], int, int] | None = None

    def __repr__(self) -> str:
        rows = f"{self.num_tokens} tokens, y {list(self.y_shape)}"
        return f"<moecomm.Handle layout={self.layout!r}, {rows}, {_state(self.rounds, self.args)}>"

    @property
    def layout(self) -> Layout:
        """The layout of the dispatch."""
        return self.plan.layout

    @property
    def num_tokens(self) -> int:
        """Number of tokens that this rank passed to the dispatch."""
        return self.args.num_tokens

    @property
    def y_shape(self) -> tuple[int, ...]:
        """Shape of the `y` that combine takes."""
        return (*self.plan.rows_shape(self.args), self.rounds.hidden)

    def check_row_weights(self) -> None:
        """Raise BadInput if a caller has changed `row_weights` in a way that combine cannot see."""
        if self.weights_read is None:
            return
        read, address, _ = self.weights_read
        weights = read()
        if weights is not None and weights.data_ptr() != address:  # by `.data =` or set_()
            want = "a change in place, which combine reads, or combine(topk_weights=)"
            raise BadInput("row_weights", "a tensor whose memory has been replaced", want)


class Chunk(NamedTuple):
    """Tokens of a dispatch that went in a round of their own."""

    tokens: slice  # of this rank
    handle: Any  # of the round; a Handle has its tables outside of the window
    room: tuple[int, ...]  # shape of its rows, without their columns
    rows: torch.Tensor  # int64: the rows of the round that hold a token, in order
    places: torch.Tensor  # int64: their rows in the whole

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the round's rows of `whole`, at their places in the round; zeros elsewhere."""
        dims = len(self.room)
        taken = whole.flatten(0, dims - 1)[self.places]
        room = math.prod(self.room)
        if len(taken) < room:
            taken = taken.new_zeros((room, *taken.shape[1:])).index_copy(0, self.rows, taken)
        return taken.view(*self.room, *taken.shape[1:])


class ChunkedHandle(Handle):
    """The handle of a dispatch whose tokens went in chunks: see moecomm/dispatch/chunks.py."""

    __slots__ = ("chunks",)

    def __init__(
        self, rounds: Rounds, plan: DispatchPlan, args: _native.DispatchArgs, block: Any, chunks: list[Chunk]
    ) -> None:
        super().__init__(rounds, plan, args, block)
        self.chunks = chunks

    def check_row_weights(self) -> None:
        """Raise BadInput as for other handles, and for a change in place: combine reads the weights of the chunks."""
        super().check_row_weights()
        if self.weights_read is not None:
            read, _, version = self.weights_read
            weights = read()
            if weights is not None and _version_of(weights) != version:
                got = "a tensor that has been changed, of a dispatch that took several rounds"
                raise BadInput("row_weights", got, "an unmodified one: multiply y instead")


def _version_of(tensor: torch.Tensor) -> int:
    """Return the number of changes in place; 0 for tensors of torch.inference_mode(), which do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def has_arrived(args: _native.DispatchArgs) -> bool:
    """Return whether a dispatch is complete: False from dispatch_begin() until dispatch_end() has succeeded.

    `DispatchArgs::part` is the only place that says so.
    """
    return args.part != BEGIN


class Routed(Bound, Generic[X_co, Scales_co, Flat_co, ByExpert_co]):
    """The tokens that arrived at this rank's experts.  R ranks, K = topk, H = hidden, E = num_experts.

    Attributes:
        x: rows of the payload's dtype: `[rows, H]` (flat, expert) or `[E/R, rows, H]` (batched); in the place of H the
            columns that were given, or those of the format: see moecomm.formats.
        scales: a row of scales for each row of `x`, or None: `[rows, n]` (batched `[E/R, rows, n]`), of the dtype of
            the scales given or of the format; of `quantize="fp8"`: n = ceil(H / 128) of float32, or float8_e8m0fnu for
            "ue8m0".  With `scale_layout="column"` a column is contiguous, and the next begins `rows` rounded up to 4
            later; scales of one byte are then four in an int32, the first in the lowest byte: n = ceil(H / 512) of
            "ue8m0".  "swizzled": see formats.swizzle().
        extras: the tensors given as `extras`, `[rows, ...]` each (batched `[E/R, rows, ...]`).
        tokens_per_expert: int32 `[E/R]`, without padding, on the device.
        rows_per_expert: int64 `[E/R]`: the same; expert: rounded up to `expert_alignment`.
        num_rows: int32 `[1]`, on the device: flat: rows in use; expert: the end of the last group, padding included;
            batched: the sum of `tokens_per_expert`.  Rows past it are not initialized, except `topk_idx` and
            `topk_weights`.
        src: int32 `[rows, 2]` (batched `[E/R, rows, 2]`): source rank and token of each row; -1, -1 in padding.
        topk_idx: flat: `[rows, K]` in the dtype of the ids given: this rank's expert, 0 to E/R - 1, or -1 for an expert
            of another rank.  With `max_rows` given and no `sync`, -1 in rows past `num_rows`, too.
        topk_weights: flat: float32 `[rows, K]`, 0 beside -1.
        row_weights: expert, batched: float32 `[rows]` (`[E/R, rows]`), the routing weight of each row, 0 in padding.
            Combine reads them where they are: a change in place counts, and other memory (by `.data =`) is BadInput,
            as is any change after a dispatch that took several rounds.
        dropped: int32 `[1]`, on the device: entries of this rank's `topk_idx` that found no room; None unless
            `overflow="drop"`.
        handle: for combine, and to repeat the dispatch.

    A tensor is made when it is first read.  The tensors of dispatch_begin() can't be read before dispatch_end():
    BadInput.
    """

    __slots__ = (
        "__weakref__",
        "_tensors",
        "args",
        "back",
        "check",
        "copies",
        "dropped",
        "handle",
        "inputs",
        "payload",
        "plan",
        "sync",
        "unpack",
    )
    _instead = "its tensors, and topk_idx and topk_weights to dispatch again"

    def __init__(self, handle: Handle, plan: DispatchPlan, args: _native.DispatchArgs, payload: _native.Block) -> None:
        self.handle, self.plan, self.args, self.payload = handle, plan, args, payload
        self.sync = False
        self.dropped: torch.Tensor | None = None
        # Reads a tensor, by its name here, of rows that arrive as bytes: moecomm.dispatch.payloads.Payload.tensor.
        self.unpack: Callable[[str, Routed[Any, Any, Any, Any]], Any] | None = None
        self.back: Callable[[torch.Tensor], Any] | None = None  # to the caller's kind of arrays; None: torch's
        self.inputs: Any = None  # kept until the executor has read them
        self.check: Any = None  # of a verified dispatch, until it has run
        self.copies: Callable[[], None] | None = None  # see dispatch.prepare(), until it has run
        self._tensors: dict[str, Any] = {}

    def __repr__(self) -> str:
        plan, args = self.plan, self.args
        scales = "" if plan.scales_dtype is None else f", scales {plan.scales_dtype}"
        columns = args.row_bytes if plan.x_dtype is torch.uint8 else args.hidden
        shape = [*plan.rows_shape(args), columns]
        return (
            f"<moecomm.Routed layout={plan.layout!r}, x {shape} {plan.x_dtype}{scales}, {plan.device}, "
            f"{_state(self.handle.rounds, args)}>"
        )

    @property
    def x(self) -> X_co:
        found: X_co = self._read("x")
        return found

    @property
    def scales(self) -> Scales_co:
        found: Scales_co = self._read("scales")
        return found

    @property
    def extras(self) -> tuple[Any, ...]:
        return () if self.unpack is None else self._read("extras")

    @property
    def tokens_per_expert(self) -> X_co:
        found: X_co = self._read("tokens_per_expert")
        return found

    @property
    def rows_per_expert(self) -> X_co:
        found: X_co = self._read("rows_per_expert")
        return found

    @property
    def num_rows(self) -> X_co:
        found: X_co = self._read("num_rows")
        return found

    @property
    def src(self) -> X_co:
        found: X_co = self._read("src")
        return found

    @property
    def topk_idx(self) -> Flat_co:
        found: Flat_co = self._read("topk_idx")
        return found

    @property
    def topk_weights(self) -> Flat_co:
        found: Flat_co = self._read("topk_weights")
        return found

    @property
    def row_weights(self) -> ByExpert_co:
        found: ByExpert_co = self._read("row_weights")
        return found

    def _read(self, name: str) -> Any:
        if name not in self._tensors:
            if not has_arrived(self.args):
                raise BadInput(
                    "routed", "a dispatch that has only begun", "dispatch_end(routed) before its tensors are read"
                )
            tensor = (self.plan.tensor if self.unpack is None else self.unpack)(name, self)
            if name == "row_weights" and tensor is not None:
                self.handle.weights_read = weakref.ref(tensor), tensor.data_ptr(), _version_of(tensor)
            if tensor is not None and self.back is not None:
                tensor = tuple(map(self.back, tensor)) if name == "extras" else self.back(tensor)
            self._tensors[name] = tensor
        return self._tensors[name]


def _state(rounds: Rounds, args: _native.DispatchArgs) -> str:
    state = "closed" if rounds.closed else "open"
    begun = "" if has_arrived(args) else ", begun and not ended"
    return f"rank {rounds.rank} of {rounds.num_ranks}, Buffer {state}{begun}"
