"""Training on several ranks and again on one: options of the command line, and both loss curves side by side."""

from __future__ import annotations

import argparse

from moecomm.tools.launch import launch


def train_twice(target: str, unit: str) -> tuple[list[float], list[float]]:
    """Run `target` ("module:function", with an argument `steps`) on several ranks and on one. Returns both curves."""
    parser = argparse.ArgumentParser(description="Trains the same model on several ranks and on one.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4, choices=[1, 2, 4])
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: got {options.steps}; want 1 or more")
    several, one = (launch(target, {"steps": options.steps}, ranks)[0] for ranks in (options.ranks, 1))
    print(f"step   {options.ranks} ranks    one rank   ({unit})")
    for step in [*range(0, options.steps, max(1, options.steps // 10)), options.steps - 1]:
        print(f"{step:4d}  {several[step]:9.6f}  {one[step]:9.6f}")
    return several, one
