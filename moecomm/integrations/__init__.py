"""moecomm inside frameworks: a package each, imported by whoever has that framework."""
