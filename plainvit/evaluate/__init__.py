"""Weights -> numbers.

prediction    predictor (a model with its preprocessing), predict (images -> rows), inputs, outputs, cluster (Ray)
evaluation    classify, metrics, labels (which predictions are correct), class_names, card (a stored result), compare,
              seeds (groups of runs), statistics, paper (its tables)
features      features (of a dataset, cached on disk), probe (few-shot, k-NN, linear), probe_sets (on data
              sets), grid (the best value)
inspection    inspection (a weights file, or one pass through a named model)
"""
