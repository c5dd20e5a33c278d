"""Output of a job: each record is written once, and survives a crash. Imports `jobs/rows` and `jobs/formats`."""
