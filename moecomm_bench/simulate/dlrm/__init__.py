"""`moecomm simulate dlrm`: a cost model of one training iteration of a recommendation model (DLRM).

Times on one GPU, and of collectives over NVLink, are fitted to measurements of two H100s (`fit`, `h100.json`). Between
NVLink domains the NIC of `moecomm_bench.simulate.nic` takes the place of NVLink. `iteration` chains the operators.
"""
