"""What a job shows of itself: flight records, counters, traces."""
