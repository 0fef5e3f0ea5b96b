"""Speed and memory of a model on a backend."""
