"""The command line: demo, doctor, tune, and the launch of local ranks."""
