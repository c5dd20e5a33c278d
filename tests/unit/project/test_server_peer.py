"""llama.cpp's own server tests against our server: the program in between, and the record of tests that fail."""

import re
from pathlib import Path

from llamabatch.native_build import source
from tests.server_peer import expectations
from tests.server_peer.suite import ASIDE

REPOSITORY = Path(__file__).parents[3]


def test_a_run_is_compared_with_the_expected_failures():
    found = expectations.compare(
        ["a", "b", "c", "d", "e"],
        {"a": "passed", "b": "failed", "c": "failed", "d": "passed"},
        {"c": "why", "d": "why"},
    )
    assert found.passed == ["a", "d"]
    assert found.failed == ["b", "c"]
    assert (found.unexpected, found.cured, found.missing) == (["b"], ["d"], ["e"])
    assert not found.is_exact
    assert expectations.compare(["a", "c"], {"a": "passed", "c": "skipped"}, {"c": "why"}).is_exact


def test_the_record_is_of_the_source_that_we_build_from():
    record = expectations.read_passed()
    assert record["llama_cpp_python"] == source.VERSION
    assert re.fullmatch("[0-9a-f]{40}", record["llama.cpp"])
    assert record["aside"] == ASIDE
    assert len(record["ids"]) == len(set(record["ids"])) > 200
    assert not [name for name in record["ids"] if name.startswith(tuple(ASIDE))]


def test_nine_in_ten_pass_and_each_failure_has_its_reason():
    ids, failures = expectations.read_passed()["ids"], expectations.read_failures()
    assert set(failures) <= set(ids)
    assert not [reason for reason in failures.values() if reason.startswith("not known") or len(reason) < 20]
    assert len(failures) <= len(ids) / 10


def test_the_documentation_has_the_figures():
    assert expectations.table() in (REPOSITORY / "docs" / "conformance.md").read_text(encoding="utf-8")
