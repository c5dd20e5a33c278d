"""The input of a job: files and stdin become numbered rows.

Imports `jobs/rows` and `jobs/formats`. From `output/`, imports `manifest` and `own_files` to recognise other jobs'
outputs, and `parquet` to check that pyarrow is installed.
"""
