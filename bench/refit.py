"""Refit the model to bench/results, and rewrite all that follows from it.

    python bench/refit.py

Writes moecomm_bench/simulate/h200.json; simulate-check.json, simulate.json, wide-ep.json and dlrm.json in
bench/results; wide_ep.md and the tables of dlrm.md in docs/maintainers, and the pages of bench/readme.py. A new result
only has to lie in bench/results.
"""

from __future__ import annotations

import json
from pathlib import Path

import dlrm_page
import readme
import wide_ep
from wide_ep import ROOT

from moecomm.router import MODELS
from moecomm_bench.results import write
from moecomm_bench.simulate.check import check
from moecomm_bench.simulate.domain import parse
from moecomm_bench.simulate.fit import fit_all
from moecomm_bench.simulate.fit import write as write_fit
from moecomm_bench.simulate.model import Machine
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.predict import SimulatedCase, predict
from moecomm_bench.simulate.routing import DrawnGate

RESULTS = ROOT / "bench" / "results"
PARAMETERS = ROOT / "moecomm_bench" / "simulate" / "h200.json"
SIZES = [1, 2, 4, 8, 16, 32, 64, 128]  # domains of simulate.json


def refit(results: list[Path]) -> None:
    """Fit, check, predict, and write everything."""
    fitted = fit_all(results)
    write_fit(PARAMETERS, fitted)
    domain, nic = parse(fitted), ModelNic(efficiency=fitted["nic"]["efficiency"])
    checked = check(results, domain, ModelNic(), fitted["nic"])
    write(RESULTS / "simulate-check.json", {"benchmark": "simulate-check", **checked})
    model = MODELS["deepseek-v3"]
    gate = DrawnGate(model.num_experts, model.topk, model.num_groups, model.topk_groups)
    asked = SimulatedCase("deepseek-v3", model.hidden, model.intermediate, gate, SIZES, 8, [1, 128, 4096])
    write(RESULTS / "simulate.json", predict(asked, Machine(domain, nic)))
    write(wide_ep.RESULT, wide_ep.measure(domain, nic, fitted["nic"], checked["measured"]))
    wide_ep.PAGE.write_text(wide_ep.page(json.loads(wide_ep.RESULT.read_text())))
    write(dlrm_page.RESULT, dlrm_page.measure(dlrm_page.fit(results), nic))
    dlrm_page.PAGE.write_text(dlrm_page.page(json.loads(dlrm_page.RESULT.read_text()), dlrm_page.PAGE.read_text()))
    readme.write_pages()


if __name__ == "__main__":
    refit(sorted(RESULTS.glob("*.json")))
