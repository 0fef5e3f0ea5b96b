"""Traced decode steps: `view` gives the forward arrays to be traced over, `trace` keeps the compiled functions."""
