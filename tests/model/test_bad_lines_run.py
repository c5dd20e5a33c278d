"""200 kinds of bad line through the command: one error row each, and everything around them complete."""

from tests.long import bad_lines_run


def test_one_error_row_each(tmp_path):
    for number in range(bad_lines_run.QUICK):
        bad_lines_run.case(number, tmp_path)
