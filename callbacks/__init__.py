"""The researchers' gallery: one callback a file, made of the public API only."""
