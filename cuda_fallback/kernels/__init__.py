"""Triton kernels and the CUDA graph of a decoded token."""
