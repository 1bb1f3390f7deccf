"""Records of a job: flight records, counters, traces.  What rounds note as they run is in moecomm.rounds."""
