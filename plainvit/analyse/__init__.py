"""Weights and runs -> figures and pages."""
