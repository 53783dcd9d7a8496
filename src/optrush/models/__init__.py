"""Our decoder for the Llama-shaped families, transformers' models behind the same interface, weights and shapes."""
