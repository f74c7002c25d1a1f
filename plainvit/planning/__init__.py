"""A config -> what it will cost, by arithmetic alone.

cost        parameters, multiply-adds, the paper's training compute
memory      of a training step, part by part; the largest batch that fits
step_time   by a roofline over the rates of devices
ranks       what one rank of many would hold and send: sharding, simulated
shapes      of published models, by their names: nothing is fetched for a plan
plan        all of it for a run: `plainvit plan`
"""
