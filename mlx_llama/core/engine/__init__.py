"""Many requests on one model: their rows of the cache, the loop that computes them, drafts and
memory.
"""
