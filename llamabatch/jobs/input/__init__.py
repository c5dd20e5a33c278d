"""The rows of a job: files, formats, templates, ids. Imports `jobs.rows` and what stands below `jobs`."""
