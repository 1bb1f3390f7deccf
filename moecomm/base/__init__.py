"""Foundations of all other packages: checks, arrays of other libraries, constants of the protocol, processes."""
