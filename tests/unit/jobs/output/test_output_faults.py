"""The first cases of the long tests of a job's output; `make test-long` runs all cases."""

import pytest

from tests.long import file_faults, full_disk, killed_tables, output_cuts


@pytest.mark.parametrize("figure", [file_faults, output_cuts], ids=lambda figure: figure.__name__)
def test_the_first_cases_of(figure, tmp_path):
    for number in range(figure.QUICK):
        folder = tmp_path / str(number)
        folder.mkdir()
        figure.case(number, folder)


@pytest.mark.skipif(full_disk.cannot() is not None, reason=str(full_disk.cannot()))
@pytest.mark.parametrize("number", range(full_disk.QUICK))
def test_a_disk_that_is_really_full(number, tmp_path):
    full_disk.case(number, tmp_path)


@pytest.mark.parametrize("number", range(killed_tables.QUICK))
def test_a_table_or_a_compressed_output_that_is_killed_has_the_bytes_of_one_that_is_not(number, tmp_path):
    killed_tables.case(number, tmp_path)
