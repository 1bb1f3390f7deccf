"""python -m moecomm: the same as the command moecomm."""

from moecomm.cli import main

main()
