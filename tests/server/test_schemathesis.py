"""schemathesis makes 10,000 cases from the OpenAPI document. None may give a 5xx, with two exceptions.

These are 504 after a deadline that the case sets, and 501 of an endpoint that this model or server lacks, such as
/infill.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.encoder_files import write_encoder
from tests.server.conftest import running

CASES = 10_000
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501, 504]
"""


def cases(url: str, folder: Path, seed: int, *options: str) -> int:
    """Runs schemathesis once, checks that no status is wrong, and returns the number of cases."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    program = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(config), "run"]
    phases = ["--phases", "examples,coverage,fuzzing", "--checks", "not_a_server_error", "--request-timeout", "60"]
    given = [f"{url}/openapi.json", *phases, "--seed", str(seed), "--no-color", *options]
    environment = os.environ | {"COLUMNS": "120"}
    ended = subprocess.run(program + given, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stdout[-20000:] + ended.stderr[-2000:]
    return int(re.search(r"([\d,]+) generated", ended.stdout)[1].replace(",", ""))


def test_no_case_is_an_internal_error(tmp_path):
    done, seed = 0, 1
    with running(tmp_path, model="tiny", n_slots=8, sampling={"max_tokens": 8}) as url:
        while done < CASES:
            done += cases(url, tmp_path, seed, "--max-examples", "25")
            seed += 1
    print(f"{done} cases")


@pytest.mark.parametrize("kind", ["bert-rank", "bert-classes"])
def test_no_case_of_an_encoder_is_an_internal_error(tmp_path, kind):
    path = write_encoder(kind, tmp_path / "encoder.gguf")
    paths = "rerank|score|classify|embed|tokenize"
    with running(tmp_path, model=str(path)) as url:
        assert cases(url, tmp_path, 1, "--max-examples", "60", "--include-path-regex", paths) > 500
