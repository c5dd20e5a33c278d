"""`llamabatch compare`: runs every strategy on the same prompts, each alone in fresh processes, and advises one.

The modules in their order: tools.workload (the prompts) -> run (one strategy after another) -> measure (one
strategy) -> report (figures, batch sizes) -> advice (one sentence). table, plot and document show the report.
"""
