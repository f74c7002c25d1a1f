"""Weights -> numbers.

answers       predictor (a model as it answers), predict (images -> rows), inputs, outputs, cluster (Ray), peers (timm)
evaluation    classify, labels (what is right), card (a result to keep), compare, chance (intervals), paper (its tables)
features      features (of a data set, kept on disk), probe (the arithmetic), frozen (the protocol and its tables)
before a run  plan by cost (compute), memory, speed (time of a step), devices (their rates), ranks (sharding, simulated)
inspection    describe (a weights file), forward (one pass through a named model)
"""
