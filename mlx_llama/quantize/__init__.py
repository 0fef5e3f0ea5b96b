"""Quantize a model, for MLX or as a GGUF file."""
