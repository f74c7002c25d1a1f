"""Weights and runs -> figures and pages.

pages        page (HTML, nothing of ours), report (of a run), run (its folder), evaluation, evaluation_page, understand
sections     curves, confusion, gallery, masked: each with its figure and its numbers
analysis     subject (what is looked at), parts, maps, explorer; their figures are in drawings
numbers      attention, embeddings, tokens, robust
style        figures: colours, fonts, how a figure is saved
"""
