"""Config -> cost: FLOPs, memory and time of a training run, computed without running it.

cost        parameters, multiply-adds, training FLOPs
memory      bytes of a training step on one device, by purpose
devices     peak rates, memory and links of the known GPUs
step_time   seconds of a training step, from steps measured on an H200
datasets    images and classes of known datasets
plan        all of it for one run: `plainvit plan`
"""
