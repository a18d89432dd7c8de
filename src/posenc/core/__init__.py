"""What encodings and engines share: positions, plans, masks, formulas. It imports neither side."""
