"""Changes of the ranks that take part: shrink and grow, masks, memory that is given back for a while."""
