"""Least squares of positive terms around expected values (Levenberg-Marquardt on logarithms)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moecomm_bench.simulate.routing import Array

_STEPS, _DIFFERENCE, _ENOUGH = 60, 1e-4, 1e-6


def solve(errors: Callable[[Array], Array], expected: Array, spread: Array) -> Array:
    """Return the terms with the least sum of squares of `errors(terms)` and of log(terms / expected) / spread.

    `spread` is the standard deviation of the logarithm around the expected value: terms that the errors do not
    determine keep their expected values. All terms are positive.
    """
    center = np.log(expected)

    def residuals(logs: Array) -> Array:
        return np.concatenate([errors(np.exp(logs)), (logs - center) / spread])

    logs, damping = center.copy(), 1e-2
    now = residuals(logs)
    for _ in range(_STEPS):
        moved = [residuals(logs + _DIFFERENCE * unit) for unit in np.eye(len(logs))]
        jacobian = (np.array(moved) - now).T / _DIFFERENCE
        normal = jacobian.T @ jacobian
        step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), jacobian.T @ now)
        tried = residuals(logs + np.clip(step, -1, 1))
        gained = now @ now - tried @ tried
        if gained > 0:
            finished = gained < _ENOUGH * (now @ now)
            logs, now, damping = logs + np.clip(step, -1, 1), tried, max(damping / 3, 1e-6)
            if finished:
                break
        elif (damping := damping * 4) > 1e6:
            break
    return np.asarray(np.exp(logs))
