"""The table of a plan, the line that says what to take, and notes on how far to trust it."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from moecomm.tools.fitted import new_table, show_table


def show(result: dict[str, Any], out: Console) -> None:
    """Print the table of `moecomm plan`."""
    case, rows, chosen = result["case"], result["rows"], result["plan"]
    name = f"[bold]{case['model']}[/]: " if case["model"] else ""
    target = f"at most {case['target_us']:g} us a layer" if case["target_us"] else "the least time"
    out.print(
        f"[bold]Predicted[/], not measured.  {name}hidden {case['hidden']}, {case['intermediate']} columns inside an "
        f"expert; {case['tokens']} tokens a rank; {target}; {case['memory_gib']:g} GiB a GPU, layers: "
        f"{case['layers']}\nrouting: {result['inputs']['routing']}",
        highlight=False,
    )
    table = new_table(
        ("", "GPUs", "slots", "format", "layout"),
        ("dispatch us", "GEMMs us", "combine us", "layer us", "at worst us", "GiB", "weights", "window", "GiB left"),
    )
    for row in rows:
        mark = "[green]take[/]" if row == chosen else "" if row["fits"] and row["meets"] else "[red]no[/]"
        gpus = f"{row['domains']} x {row['gpus'] // row['domains']}" if row["domains"] > 1 else str(row["gpus"])
        replicas = f", {row['replicas']} replicas" if row["replicas"] else ", placed" if row["placed"] else ""
        at_worst = "?" if row["at_worst_us"] is None else f"{row['at_worst_us']:.1f}"
        times = (f"{row[f'{part}us']:.1f}" for part in ("dispatch_", "gemm_", "combine_", ""))
        memory = (f"{row[f'{part}_gib']:.2f}" for part in ("memory", "weights", "window", "memory_margin"))
        table.add_row(mark, gpus, f"{row['slots']}{replicas}", row["format"], row["layout"], *times, at_worst, *memory)
    show_table(table, out)
    if chosen is None:
        out.print(f"[red]No plan.[/] Not enough {result['lacks']}.", highlight=False)
    else:
        out.print(_taken(chosen), highlight=False)
    for note in notes(result):
        out.print(note, style="dim", markup=False, highlight=False)


def _taken(row: dict[str, Any]) -> str:
    margin = row["time_margin_us"]
    time = f", {margin:.1f} us below the target" if margin is not None else ""
    if margin is not None and row["at_worst_us"] is not None:
        above = row["at_worst_us"] - row["us"] - margin
        time += f", {above:.1f} us above it at worst" if above > 0 else ", and below it at worst"
    factor = f", capacity_factor={row['capacity_factor']:g}" if row["capacity_factor"] is not None else ""
    factor += f", window_bytes={row['window_bytes']}" if row["window_bytes"] is not None else ""
    return (
        f"[green]Take[/] {row['gpus']} GPUs, {row['slots']} slots a GPU ({row['replicas']} replicas), {row['format']}, "
        f"layout {row['layout']}{factor}: {row['us']:.1f} us a layer{time}; {row['memory_gib']:.2f} GiB, "
        f"{row['memory_margin_gib']:.2f} GiB left; room for {row['rows']} rows, "
        f"{row['rows_needed']:g} expected on the busiest rank"
    )


def notes(result: dict[str, Any]) -> list[str]:
    """Return notes on how far to trust the predictions: known errors, and what was never measured."""
    rows, inputs, case = result["rows"], result["inputs"], result["case"]
    fitted = inputs["fitted_ranks"]
    found = [
        f"At worst: dispatch and combine with the largest error of the model's fit to {inputs['domain']} GPUs "
        f"({', '.join(map(str, fitted))} of one domain); GEMMs as predicted.  `moecomm simulate check` has all errors.",
        "GEMMs: a roofline; never compared with measured layers.  Memory: weights of experts and the window; not "
        "counted: the experts' intermediate rows, attention, KV cache, and what torch keeps.",
    ]
    if any(row["domains"] == 1 and row["gpus"] not in fitted for row in rows):
        found.append("Other numbers of GPUs in a domain were never measured, so that no error of theirs is known.")
    if any(row["domains"] > 1 for row in rows):
        found.append(
            f"Several domains were never measured through a NIC; {inputs['nic_gbs']:g} GB/s a GPU, with the share that "
            "other libraries' published times show."
        )
    if any(row["format"] != "bf16" for row in rows):
        found.append("FP8: arithmetic is at the speed of bf16, for want of a fit; weights and rows have their bytes.")
    if any(row["layout"] == "flat" for row in rows):
        found.append("flat: sorting rows by expert and adding them up is the caller's, and in no time here.")
    if case.get("routing_file"):
        found.append(
            "Replicas are placed by the first half of each layer's tokens, and times are means over layers of the "
            'second half; choice="token".'
        )
    else:
        found.append(
            "All experts are taken as equally likely: a skewed gate takes longer, and replicas help.  Record yours."
        )
    return found
