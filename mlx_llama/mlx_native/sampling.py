"""Logits to tokens, lazily: penalties, temperature, filters, Gumbel noise, argmax."""

from .kernels.draw import SamplingBatch, gumbel

__all__ = ["SamplingBatch", "gumbel"]
