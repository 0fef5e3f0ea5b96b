"""The machine and the progress of long operations."""
