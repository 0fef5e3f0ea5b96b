"""The Llama in NumPy: runs on any machine, reads like the paper, computes in float32."""
