"""`llamabatch compare`: every strategy on the same prompts, each alone in fresh processes, and what follows from it.

workload (which prompts) -> run (one after another) -> measure (one strategy) -> report (the figures), sweep (batch
sizes), advice (one sentence); table, plot and timeline show it.
"""
