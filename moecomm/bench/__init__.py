"""The benchmark: dispatch and combine, put-and-signal latency, and the all-to-all ceiling, on GPUs and on CPUs.

python -m moecomm.bench, or moecomm bench.
"""
