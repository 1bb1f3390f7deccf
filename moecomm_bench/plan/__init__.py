"""`moecomm plan`: choice of ranks, slots, format and layout of a layer, by the predictions of `moecomm simulate`."""
