"""Parity, golden traces, doctor and inventory."""
