"""Files -> batches."""
