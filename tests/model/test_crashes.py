"""Some cases of the figures of crash isolation. `make test-long` runs all cases."""

import pytest

from llamabatch.native_build.tools import SetupFailure
from tests.long import killed_children, poison

# each case has another kind of model; the first three are a transformer and two hybrids
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
