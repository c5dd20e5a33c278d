"""Input of a job: files and stdin become numbered rows.

Imports `jobs/rows` and `jobs/formats`, and of `output/` the manifest and the own files, which recognise the output of
another job.
"""
