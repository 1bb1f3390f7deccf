"""Which ranks take part: shrink and grow, masks, and memory that is given back for a while."""
