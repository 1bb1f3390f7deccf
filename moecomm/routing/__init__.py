"""Routing of real models: recorded from their dispatches, kept in files, replayed in benchmarks."""

from moecomm.routing.load import Load, loads
from moecomm.routing.recorded import Recorded, join
from moecomm.routing.recorder import RoutingRecorder
from moecomm.routing.synthetic import synthesize

__all__ = ["Load", "Recorded", "RoutingRecorder", "join", "loads", "synthesize"]
