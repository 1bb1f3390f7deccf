"""Tables of choices for a GPU, measured: `moecomm tune`."""
