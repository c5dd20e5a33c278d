"""The input of a job: files and stdin become numbered rows.

Imports `jobs/rows` and `jobs/formats`, and `manifest` and `own_files` of `output/` to recognise other jobs' outputs.
"""
