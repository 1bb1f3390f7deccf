"""The command line (demo, doctor, tune) and the launcher of local ranks."""
