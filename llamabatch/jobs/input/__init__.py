"""Input of a job: files and stdin become numbered rows. Imports `jobs/rows`, `jobs/formats`, and of `output/` the
manifest alone, by which results are refused as inputs.
"""
