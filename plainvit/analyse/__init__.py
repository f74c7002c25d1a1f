"""Weights and runs -> figures and reports.

pages        page (HTML), report (of a run), run (its folder), evaluation, evaluation_page, understand (of a model)
sections     curves, confusion, gallery, masked: each with its figure and data
analysis     subject (model and images), parts, maps, explorer; drawings has their figures
numbers      attention, embeddings, tokens, robust
style        figures: colours, fonts, how figures are saved
"""
