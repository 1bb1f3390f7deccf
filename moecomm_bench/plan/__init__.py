"""`moecomm plan`: the ranks, slots, format and layout of a layer, by the predictions of `moecomm simulate`."""
