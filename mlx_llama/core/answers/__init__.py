"""An answer and its parts: text, thoughts, stops, grammars, log-probabilities."""
