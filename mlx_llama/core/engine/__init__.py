"""Concurrent requests on a model: scheduling, rows of the cache, speculation and memory."""
