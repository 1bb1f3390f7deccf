"""State, argument checks, window memory and rendezvous: all that rounds need of a Buffer."""
