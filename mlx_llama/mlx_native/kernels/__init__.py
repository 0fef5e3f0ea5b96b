"""Decode steps as one graph: `rooms` stores rows side by side, `view` and `draw` give forward and sampling arrays to be traced
over, `trace` keeps the compiled functions. `two_level` multiplies GGUF's K types on a GPU."""
