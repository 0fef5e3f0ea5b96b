"""Llama in NumPy with compiled kernels: any machine, float32 activations."""
