"""Jobs: a file of rows, each done once, run unattended. Imports `client`, `monitor`, `entrypoints` and all below them.

::

    from llamabatch.jobs import ReadOptions, Settings, run

    summary = run(Settings("prompts.jsonl", "results.jsonl", model="model.gguf"))
    print(summary.describe())

The way of a row, as `job.run` connects it:

| step | file | |
|---|---|---|
| 1 | input/sources | opens a file, a glob's files or stdin, compressed or not |
| 2 | input/jsonl, input/tables | bytes become an object, or a Problem with its reason |
| 3 | input/lines | the object becomes a task, a prompt and parameters |
| 4 | input/reader | a number, an id and a place make it a Row, or a BadRow |
| 5 | loop: Feed | the Row becomes a Request, one of those in flight |
| 6 | loop: Loop | the engine gets the Request, and gives its RequestOutput back |
| 7 | output/output | the result is due: a row is written once |
| 8 | output/records | the result becomes a record, and a line of JSON |
| 9 | output/journal | the line is appended with its checksum, or waits for an earlier row |
| 10 | output/files | the bytes reach the disk, also through signals and a full disk |

Beside it: `settings` (the job), `shared` (an engine with other users), `start_errors` (first rows that all fail),
`stats` (counts), `progress` (status), `summary`, `plot`, `dry_run`; `output/resume` opens an output that is there:
`output/lock`, `output/manifest` (which job), `output/survey` (which rows), `output/rewrite` (damage);
`output/conversion` makes tables and compressed outputs.
"""

from llamabatch.jobs.job import JobInterrupted, preview, run
from llamabatch.jobs.output.output import OutputOptions
from llamabatch.jobs.output.records import RecordOptions
from llamabatch.jobs.rows import ReadOptions
from llamabatch.jobs.settings import Settings
from llamabatch.jobs.summary import Summary

__all__ = ["JobInterrupted", "OutputOptions", "ReadOptions", "RecordOptions", "Settings", "Summary", "preview", "run"]
