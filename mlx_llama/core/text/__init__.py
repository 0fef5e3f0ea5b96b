"""Tokenizers, streaming decode, chat templates."""
