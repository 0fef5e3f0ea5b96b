"""The Llama in torch: for NVIDIA GPUs; runs on torch's CPU device too."""
