"""Holds the parts of RLModule: critic, reference, optimizer, an iteration's end, resuming."""
