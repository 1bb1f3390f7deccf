"""python -m moecomm.bench, an alias of moecomm bench."""

from moecomm.bench.cli import app
from moecomm.tools.cli import run

run(app)
