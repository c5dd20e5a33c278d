"""Positions of cells: several cells of a picture share one."""

from llamabatch.llama.positions import SlotPositions, position_ranges
from llamabatch.request.media import MediaRun

FIRST = MediaRun(10, 12, 0, 0, True, 4, 1)  # 4 x 3 tokens: 12 cells at the same position; the picture takes 4 positions
SECOND = MediaRun(30, 6, 1, 0, True, 3, 1)


def test_each_cell_of_text_has_its_own_position():
    positions = SlotPositions()
    positions.add(0, MediaRun(4, 8, 0, 0, True, 8, 8))
    assert not positions
    assert [positions.of(0, cell) for cell in (0, 5, 40)] == [0, 5, 40]


def test_text_behind_a_picture_goes_on_behind_its_longer_side():
    positions = SlotPositions()
    positions.add(2, FIRST)
    positions.add(2, SECOND)
    positions.add(2, FIRST)  # the next part of the picture
    assert [positions.of(2, cell) for cell in (9, 10, 15, 22, 29, 30, 33, 36, 40)] == [
        9,
        10,
        10,
        14,
        21,
        22,
        22,
        25,
        29,
    ]
    assert positions.of(1, 40) == 40


def test_the_highest_position_behind_a_picture_is_that_of_its_cells():
    positions = SlotPositions()
    positions.add(0, FIRST)
    assert positions.length(0, 22) == 11
    assert positions.length(0, 23) == 15
    assert positions.length(0, 10) == 10


def test_cuts_and_copies_take_pictures_along():
    positions = SlotPositions()
    positions.add(0, FIRST)
    positions.add(0, SECOND)
    positions.copy(0, 1, 30)
    assert positions.runs(1, 99) == (FIRST,)
    positions.cut(0, 22)
    assert positions.runs(0, 99) == (FIRST,)
    positions.cut(0, 10)
    assert positions.runs(0, 99) == ()
    positions.put(3, (FIRST, SECOND), 36)
    positions.keep(frozenset({3}))
    assert positions.runs(3, 99) == (FIRST, SECOND)
    assert positions.runs(3, 35) == (FIRST,)
    assert positions.runs(1, 99) == ()


def test_the_positions_that_cells_may_have():
    runs = [MediaRun(2, 4, 0, 0, True, 2, 1), MediaRun(8, 3, 1, 0, True, 1, 3)]
    least, most = position_ranges(runs, 12)
    assert least.tolist() == [0, 1, 2, 2, 2, 2, 4, 5, 6, 6, 6, 7]
    assert most.tolist() == [0, 1, 2, 2, 2, 2, 4, 5, 8, 8, 8, 7]
    assert position_ranges([], 3).tolist() == [[0, 1, 2], [0, 1, 2]]
