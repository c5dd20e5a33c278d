"""Defects of jobs over files, and of calls for columns of tables."""

from __future__ import annotations

from tests.defects import Defect

DEFECTS = (
    Defect(
        what="--retry-errors does nothing for a job that had come to its end",
        file="llamabatch/jobs/output/resume.py",
        old="if ending is None or _size(self.out) != ending.bytes or (self._retry_errors and ending.errors):",
        new="if ending is None or _size(self.out) != ending.bytes:",
        tests=("tests/unit/jobs/output/test_output.py", "tests/unit/jobs/test_job.py"),
    ),
    Defect(
        what="beside a row that cannot be run, the answers of a table stand in the rows of others",
        file="llamabatch/columns/generate.py",
        old="yield ready[index][0], result\n",
        new="yield index, result\n",
        tests=("tests/unit/columns/test_generate.py", "tests/unit/columns/test_map.py"),
    ),
    Defect(
        what="a CSV file of results has no column for a figure that is 0 in all rows, such as num_cached_tokens",
        file="llamabatch/jobs/output/columns.py",
        old='elif value not in (None, "", [], {}):',
        new="elif value:",
        tests=(
            "tests/unit/jobs/output/test_parquet_and_stream.py",
            "tests/unit/jobs/input/test_tables.py",
            "tests/model/test_tables.py",
        ),
    ),
    Defect(
        what="a line that is too long becomes two rows, so that all rows behind it have another number",
        file="llamabatch/jobs/input/jsonl.py",
        old="while line := stream.readline(limit + 2):",
        new="while line := stream.readline(limit + 1):",
        tests=(
            "tests/unit/jobs/input/test_reader.py",
            "tests/unit/jobs/input/test_bad_lines.py",
            "tests/unit/jobs/input/test_tables.py",
        ),
    ),
    Defect(
        what="a row with top_k 4 is sampled with max_tokens 4 where a row before it asked for that",
        file="llamabatch/jobs/input/lines.py",
        old="key = repr(values)",
        new="key = repr(list(values.values()))",
        tests=("tests/unit/jobs/input/test_lines.py", "tests/unit/jobs/input/test_reader.py"),
    ),
    Defect(
        what="in a data frame of pandas that was filtered, answers stand in the rows of others, or nowhere",
        file="llamabatch/columns/frames.py",
        old="each.values, native.index, dtype=object if",
        new="each.values, dtype=object if",
        tests=("tests/unit/columns/test_frames.py", "tests/model/test_columns.py"),
    ),
    Defect(
        what="a job hangs for ever once it has read half a million tokens of prompts",
        file="llamabatch/jobs/loop.py",
        old="self._n_tokens -= found.n_tokens",
        new="pass",
        tests=("tests/unit/jobs/test_loop.py", "tests/unit/jobs/test_shared.py"),
    ),
    Defect(
        what="errors written before a job was stopped count for nothing once it has ended: --retry-errors leaves them",
        file="llamabatch/jobs/output/output.py",
        old="self.n_errors_before = self._n_errors = self._journal.n_errors",
        new="self.n_errors_before = self._journal.n_errors",
        tests=("tests/unit/jobs/output/test_output.py", "tests/unit/jobs/test_job.py"),
    ),
    Defect(
        what="where more than a MiB of results waits for a slow row, results are written twice",
        file="llamabatch/jobs/output/journal.py",
        old="lines, n_bytes = [], 0",
        new="n_bytes = 0",
        tests=("tests/unit/jobs/output/test_output.py",),
    ),
    Defect(
        what="map with a path and ids gives the answers of the call before, although the system message is another one",
        file="llamabatch/columns/prompts.py",
        old="_canonical([self.content, self.system, self.seed, self.error])",
        new="_canonical([self.content, self.seed, self.error])",
        tests=("tests/unit/columns/test_map.py", "tests/model/test_columns.py"),
    ),
)
