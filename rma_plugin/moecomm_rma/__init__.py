"""libmoecomm_rma.so lies here: NCCL loads it.  `moecomm.rma_plugin` finds it and has its interface in Python."""
