"""Backend against backend."""
