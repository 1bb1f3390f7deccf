"""python -m moecomm_bench, an alias of moecomm bench."""

from moecomm.tools.cli import run
from moecomm_bench.cli import app

run(app)
