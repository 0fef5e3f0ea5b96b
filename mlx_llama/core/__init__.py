"""The neutral core: standard library, NumPy and file-format libraries; never mlx, never torch."""
