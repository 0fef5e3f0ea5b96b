"""The traced step."""
