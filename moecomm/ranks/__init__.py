"""How ranks find each other and agree: groups, boards, openings, settings; the contracts of peers and sessions."""
