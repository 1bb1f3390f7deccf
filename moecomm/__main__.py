"""python -m moecomm: the same as the command moecomm."""

from moecomm.tools.cli import main

main()
