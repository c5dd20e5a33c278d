"""The output of a job. Each record is written once, and survives a crash. Imports `jobs/rows` and `jobs/formats`."""
