"""Records of a job: flight records, counters, traces."""
