"""Adapters of frozen linears (LoRA, IA3), frozen weights in 4 and 8 bits, and PEFT's files."""
