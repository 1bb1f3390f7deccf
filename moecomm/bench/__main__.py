"""python -m moecomm.bench: the same as moecomm bench."""

from moecomm.bench.cli import app
from moecomm.tools.cli import run

run(app)
