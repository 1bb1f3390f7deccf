"""A cost model of dispatch and combine over any number of NVLink domains: moecomm simulate.

Inside a domain times are fitted to what was measured (`fit`, `h200.json`); between domains the NIC is given by numbers
(`nic`).  `check` says how far off the model is, on measured and on published rows.
"""
