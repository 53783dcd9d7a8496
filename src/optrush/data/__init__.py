"""From files to packed batches."""
