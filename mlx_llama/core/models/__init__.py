"""Config readers, one frozen LlamaConfig, rope."""
