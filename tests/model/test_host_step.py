import math

from benchmarks import host_step


def test_each_way_to_drive_an_engine_is_counted_past_its_prompts():
    found = host_step.measure(list(host_step.WAYS), [2], 45, 1)
    assert found.keys() == host_step.WAYS.keys()
    assert all(0 < times[2] < math.inf for times in found.values()), found


def test_the_line_through_the_times_has_a_fixed_part_and_a_part_of_a_row():
    fixed, row = host_step.line({1: 42.0, 8: 56.0, 128: 296.0})
    assert abs(fixed - 40) < 1e-6
    assert abs(row - 2) < 1e-6
