"""Weights -> numbers."""
