"""A long list of rows, run unattended: reading it, running it, writing what comes of it.

::

    from llamabatch.jobs import ReadOptions, Settings, run

    summary = run(Settings("prompts.jsonl", "results.jsonl", model="model.gguf"))
    print(summary.describe())
"""

from llamabatch.jobs.job import JobInterrupted, preview, run
from llamabatch.jobs.output.output import OutputOptions
from llamabatch.jobs.output.records import RecordOptions
from llamabatch.jobs.rows import ReadOptions
from llamabatch.jobs.settings import Settings
from llamabatch.jobs.summary import Summary

__all__ = ["JobInterrupted", "OutputOptions", "ReadOptions", "RecordOptions", "Settings", "Summary", "preview", "run"]
