"""One decoder for the Llama-shaped families, an adapter for other causal models, weights to and from Hugging Face."""
