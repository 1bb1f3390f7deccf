"""Operators of torch that are called directly where nothing but autograd watches.

A call through torch's dispatcher takes longer of the host than a round does, and with gradients twice as long.  Graphs
of torch.compile, dispatch modes (fake tensors, make_fx, selective checkpoints), transformations of torch.func,
forward-mode AD, tensor subclasses and the profiler need the dispatcher, and get it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch
from torch.autograd import profiler

from moecomm.base.validation import are_plain

_Result = TypeVar("_Result")


class Operator(Generic[_Result]):
    """A function, the operator `moecomm::name` that runs it, and the gradient of both.

    Tensors are arguments of their own, never in lists.  The function has no output that shares memory with an argument.

    Attributes:
        names: of its arguments, in order.
    """

    def __init__(self, name: str, run: Callable[..., _Result]) -> None:
        self.run = run
        self.registered = torch.library.custom_op(f"moecomm::{name}", run, mutates_args=())
        self.__name__, self.__doc__ = run.__name__, run.__doc__
        parameters = inspect.signature(run).parameters.values()
        self.names = [parameter.name for parameter in parameters]
        self._defaults = tuple(parameter.default for parameter in parameters)
        self._tensors = [n for n, parameter in enumerate(parameters) if "Tensor" in str(parameter.annotation)]
        self._function: type[torch.autograd.Function] | None = None

    def register_fake(self, fake: Callable[..., object]) -> None:
        """Register the function that makes the outputs of fake tensors.  It takes the arguments that it names."""
        wanted = list(inspect.signature(fake).parameters)
        defaults = dict(zip(self.names, self._defaults, strict=True))

        def of_all(*args: Any, **kwargs: Any) -> object:
            given = {**defaults, **dict(zip(self.names, args, strict=False)), **kwargs}
            return fake(*map(given.__getitem__, wanted))

        self.registered.register_fake(of_all)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    ) -> None:
        """Register its gradient: see torch.library.register_autograd."""
        self.registered.register_autograd(backward, setup_context=setup_context)
        run: Callable[..., Any] = self.run

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = run(*inputs)
            setup_context(ctx, inputs, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type(f"Gradient of {self.__name__}", (torch.autograd.Function,), members)

    def __call__(self, *args: Any, **kwargs: Any) -> _Result:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or profiler._is_profiler_enabled:
            return cast("_Result", self.registered(*args, **kwargs))
        inputs: tuple[Any, ...] = args + self._defaults[len(args) :]
        if kwargs:
            rest = zip(self.names[len(args) :], self._defaults[len(args) :], strict=True)
            inputs = args + tuple(kwargs.get(name, default) for name, default in rest)
        if not are_plain(*map(inputs.__getitem__, self._tensors)):
            return cast("_Result", self.registered(*args, **kwargs))
        return self._direct(inputs)

    def plainly(self, *inputs: Any) -> _Result:
        """Call the operator with all arguments; its tensors are plain: see are_plain()."""
        if torch._C._len_torch_dispatch_stack() or profiler._is_profiler_enabled:
            return cast("_Result", self.registered(*inputs))
        return self._direct(inputs)

    def _direct(self, inputs: tuple[Any, ...]) -> _Result:
        run: Callable[..., _Result] = self.run
        if not torch.is_grad_enabled():
            return run(*inputs)
        for n in self._tensors:
            if (tensor := inputs[n]) is not None and tensor.requires_grad:
                break
        else:
            return run(*inputs)
        if self._function is not None:
            return cast("_Result", self._function.apply(*inputs))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            return run(*inputs)


def operator(
    name: str,
) -> Callable[[Callable[..., _Result]], Operator[_Result]]:
    """Decorate the function of the operator `moecomm::name`."""

    def decorate(run: Callable[..., _Result]) -> Operator[_Result]:
        return Operator(name, run)

    return decorate
