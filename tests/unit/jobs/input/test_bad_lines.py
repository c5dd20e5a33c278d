"""200 kinds of bad line: each becomes one error row in its place, and all rows around it are complete."""

import pytest

from tests.long import bad_lines


@pytest.mark.parametrize("number", range(bad_lines.QUICK))
def test_one_error_row_each(number, tmp_path):
    bad_lines.case(number, tmp_path)


def test_there_are_200_kinds():
    kinds = bad_lines.kinds()
    assert len(kinds) == len({kind.name for kind in kinds}) == len({kind.line for kind in kinds}) == 200
    assert not any(b"\n" in kind.line for kind in kinds)
