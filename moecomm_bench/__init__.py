"""The benchmark: dispatch and combine, put + signal latency, and the all-to-all ceiling, on GPUs and CPUs.

Run it with python -m moecomm_bench, or moecomm bench.
"""
