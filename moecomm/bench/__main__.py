"""python -m moecomm.bench: the same as moecomm bench."""

from moecomm.bench.cli import app
from moecomm.cli import run

run(app)
