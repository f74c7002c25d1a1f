"""Weights and runs -> figures and reports.

reports      report (training run), evaluation, evaluation_report, analysis (model); page (HTML)
sections     headline, curves, confusion, gallery, masked: each with its figure and data
analysis     subject (model and images), findings, explorer; drawings has their figures
numbers      attention, embeddings
style        figures: colors, fonts, how figures are saved
"""
