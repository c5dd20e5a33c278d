"""The records of a job, each written once: journal, manifest, locks, formats. Imports `jobs.rows` and what stands
below `jobs`.
"""
