"""Ten seconds of the hour of mixed load: every request accounted for, and nothing left behind."""

from tests.long import soak


def test_ten_seconds_of_it(tmp_path):
    soak.case(0, tmp_path, seconds=10)
