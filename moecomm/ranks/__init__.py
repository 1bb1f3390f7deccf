"""Agreement of ranks: groups, boards, openings, settings; the contracts of peers and sessions."""
