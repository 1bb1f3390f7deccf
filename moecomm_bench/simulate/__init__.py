"""`moecomm simulate`: a cost model of dispatch and combine over any number of NVLink domains.

Times inside a domain are fitted to measurements (`fit`, `h200.json`). Between domains four numbers describe the NIC
(`nic`), one of them fitted to published times. `check` reports the errors of the model on measured and published rows.
"""
