"""Weights -> numbers.

answers       predictor (a model as it answers), predict (images -> rows), inputs, outputs, cluster (Ray), timm_models
evaluation    classify, labels (what is right), card (a result to keep), compare, seeds (of one setting),
              chance (intervals), paper (its tables)
features      features (of a data set, kept on disk), probe (the arithmetic), frozen (the protocol and its tables)
inspection    describe (a weights file), forward (one pass through a named model)
"""
