"""Run the command `moecomm` as `python -m moecomm`."""

from moecomm.tools.cli import main

main()
