"""Foundations of every room: checks, arrays of other libraries, constants of the protocol, documents, processes."""
