"""Jobs that run files of prompts. A job computes each row once, without supervision. Imports `client`, `monitor`,
`entrypoints` and all packages below them.

::

    from llamabatch.jobs import ReadOptions, Settings, run

    summary = run(Settings("prompts.jsonl", "results.jsonl", model="model.gguf"))
    print(summary.describe())

The steps of a row, as `job.run` connects them:

| step | file | |
|---|---|---|
| 1 | input/sources | opens a file, a glob's files or stdin, compressed or not |
| 2 | input/jsonl, input/tables | bytes become an object, or a Problem with the reason |
| 3 | input/lines | the object becomes a task, a prompt and parameters |
| 4 | input/reader | task, prompt, number, id and place become a Row; a bad line becomes a BadRow |
| 5 | loop: Feed | the Row becomes a Request in flight |
| 6 | loop: Loop | the engine gets the Request and returns its RequestOutput |
| 7 | output/output | the result is refused if its row is in the output already: each row is written once |
| 8 | output/records | the result becomes a record, and a line of JSON |
| 9 | output/journal | the line is appended with its checksum, or waits for an earlier row |
| 10 | output/files | the bytes reach the disk, even if signals arrive or the disk is full for a while |

Other modules: `settings` (the job), `shared` (an engine with other users), `start_errors` (stops a job whose first rows
all fail), `stats` (counts), `progress` (status), `summary`, `plot`, `dry_run`. `output/resume` opens an existing
output: `output/lock` locks it, `output/manifest` names its job, `output/survey` checks its rows, and `output/rewrite`
removes damaged rows. `output/conversion` makes tables and compressed outputs.
"""

from llamabatch.jobs.job import JobInterrupted, preview, run
from llamabatch.jobs.output.output import OutputOptions
from llamabatch.jobs.output.records import RecordOptions
from llamabatch.jobs.rows import ReadOptions
from llamabatch.jobs.settings import Settings
from llamabatch.jobs.summary import Summary

__all__ = ["JobInterrupted", "OutputOptions", "ReadOptions", "RecordOptions", "Settings", "Summary", "preview", "run"]
