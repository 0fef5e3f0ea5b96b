"""A folder, a .gguf file or a hub id -> named tensors; low-bit formats; writing them."""
