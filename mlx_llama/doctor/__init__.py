"""Show what this machine can run, and what is wrong with a model."""
