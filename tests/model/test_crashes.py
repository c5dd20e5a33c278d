"""The figures of crash isolation; their full counts are run by `make test-long`."""

import pytest

from tests.long import killed_children, poison


@pytest.mark.parametrize("number", range(killed_children.QUICK))
def test_killed_children(number, tmp_path):
    killed_children.case(number, tmp_path)


@pytest.mark.parametrize("number", range(poison.QUICK))
def test_poison(number, tmp_path):
    poison.case(number, tmp_path)
