"""The Llama in MLX: written for Metal, runs on MLX's CPU and CUDA devices too."""
