"""Rounds of a Buffer: state, memory, plans, headers, failures as exceptions, and what is recorded of calls."""
