"""The figures of crash isolation; their full counts are run by `make test-long`."""

import pytest

from llamabatch.native_build.tools import SetupFailure
from tests.long import killed_children, poison

# one kind of model each; the first three are a transformer and two hybrids
CASES = [pytest.param(n, marks=[pytest.mark.slow] if n > 2 else []) for n in range(killed_children.QUICK)]


@pytest.mark.parametrize("number", CASES)
def test_killed_children(number, tmp_path):
    try:
        killed_children.case(number, tmp_path)
    except SetupFailure as error:
        pytest.skip(f"no models: {error}")


@pytest.mark.parametrize("number", range(poison.QUICK))
def test_poison(number, tmp_path):
    poison.case(number, tmp_path)
