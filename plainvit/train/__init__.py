"""Batches -> weights: one loop for pre-training, fine-tuning and self-supervision."""
