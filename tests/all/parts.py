"""The parts of the tests. A file belongs to the first part that has a pattern which matches its name."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache

from tests.all import inputs


@dataclass(frozen=True)
class Part:
    """A part of the tests.

    Attributes:
        name: the name of the part, for ARGS of `make test-all`.
        patterns: patterns of the files of its tests. `*` also matches slashes.
        also: patterns of files on which its tests depend without an import.
    """

    name: str
    patterns: tuple[str, ...]
    also: tuple[str, ...] = ()

    def tests(self) -> list[str]:
        """Returns the files of its tests."""
        return [file for file, part in _of_files().items() if part == self.name]

    def inputs(self) -> str:
        """Returns a hash of all files on which its tests depend."""
        return inputs.digest(inputs.seen_by(self.tests(), self.also))


ALL = (
    Part("installed", ("tests/installed/*",), also=("*",)),
    Part(
        "docs", ("tests/model/test_docs.py", "tests/model/test_readme.py", "tests/model/test_examples.py"), also=("*",)
    ),
    Part("project", ("tests/unit/project/*",), also=("*",)),
    Part("server", ("tests/unit/server/*", "tests/model/test_server_*")),
    Part(
        "jobs",
        (
            "tests/unit/jobs/*", "tests/unit/columns/*", "tests/model/test_run.py", "tests/model/test_bad_lines_run.py",
            "tests/model/test_columns.py", "tests/model/test_watched_job.py", "tests/model/test_tables.py",
        ),
    ),
    Part(
        "models",  # tests of architectures, types of weights, and kernels
        (
            "tests/model/test_arch*", "tests/model/test_kernels.py", "tests/model/test_matrix.py",
            "tests/model/test_graph_buffers.py", "tests/model/test_state_copies.py", "tests/model/test_equal*",
            "tests/model/test_ragged.py", "tests/model/test_row_ladder.py", "tests/model/test_synth.py",
            "tests/model/test_second_turns.py", "tests/model/test_encoders.py", "tests/model/test_embeddings.py",
            "tests/model/test_portable.py", "tests/model/test_native.py", "tests/model/test_chain_peer.py",
            "tests/model/test_sampler_peer.py", "tests/model/test_long_words.py",
        ),
    ),
    Part("engines", ("tests/model/*",)),
    Part("unit", ("tests/unit/*",)),
)  # fmt: skip


@cache
def _of_files() -> dict[str, str]:
    """Returns the name of the part of each test file, by the file."""
    found = {}
    for file in inputs.files():
        if fnmatch(file, "tests/*/test_*.py"):
            name = next((part.name for part in ALL if any(fnmatch(file, each) for each in part.patterns)), None)
            if name is not None:
                found[file] = name
    return found
