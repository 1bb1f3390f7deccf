"""The command line (demo, doctor, record, routing, trace; moecomm_bench adds commands) and the launcher of ranks."""
