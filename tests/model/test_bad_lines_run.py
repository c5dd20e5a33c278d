"""`llamabatch run` writes one error row for each of 200 kinds of bad line, and whole texts for all other lines."""

from tests.long import bad_lines_run


def test_one_error_row_each(tmp_path):
    for number in range(bad_lines_run.QUICK):
        bad_lines_run.case(number, tmp_path)
