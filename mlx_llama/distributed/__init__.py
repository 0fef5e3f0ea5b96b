"""Tensor parallelism: one model over the processes that mlx.launch or torchrun started."""
