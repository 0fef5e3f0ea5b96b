"""Decode steps as one graph: `buffers` stores rows side by side, `view` and `draw` write forward
and sampling as functions of arrays, `trace` keeps the compiled functions. `two_level` multiplies
GGUF's K types on a GPU."""
