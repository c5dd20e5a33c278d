"""Pictures in all forms are decoded to pixels, if the size in their header is within bounds."""

import base64
import io
import struct
import zlib
from concurrent.futures import CancelledError

import numpy as np
import pytest
from PIL import Image

from llamabatch.errors import EngineError, PromptError
from llamabatch.media.parts import MediaInput, has_media, marked, parts_of_cell
from llamabatch.media.pictures import pixels_of, read_picture
from llamabatch.media.prompt import Prompt
from llamabatch.request.media import Media, MediaRun, cell_ids

RED = (200, 30, 30)


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Returns a PNG whose header says how large it is, but which has no pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = b"\0\0\0\0IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + end


PICTURE = Image.new("RGB", (6, 4), RED)


def pictures_in(conversation) -> list[Media]:
    parts = marked(conversation)[1]
    given = MediaInput(len(parts), pictures=True, rate=0)
    for part in parts:
        given.add_part(part)
    return given.media


def test_each_form_of_a_picture_gives_the_same(tmp_path, monkeypatch):
    data = file_of(PICTURE)
    (tmp_path / "a b.png").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    address = "data:image/png;base64," + base64.b64encode(data).decode()
    forms = [data, "a b.png", tmp_path / "a b.png", address, PICTURE, np.asarray(PICTURE), bytearray(data)]
    found = [read_picture(form) for form in forms]
    assert all(each == Media(bytes(RED) * 24, 6, 4) for each in found)


def test_a_file_is_held_as_it_is_and_a_path_by_its_name(tmp_path):
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    data, path = file_of(noise, "JPEG"), tmp_path / "a.jpg"
    path.write_bytes(data)
    of_file, of_path = read_picture(data), read_picture(path)
    assert of_file == of_path
    assert (of_file.data, of_path.data) == (data, str(path))
    assert pixels_of(of_file) == pixels_of(of_path)
    assert len(pixels_of(of_file)) == 64 * 64 * 3
    path.write_bytes(file_of(PICTURE))
    with pytest.raises(EngineError, match="has changed since it was given"):
        pixels_of(of_path)
    path.unlink()
    with pytest.raises(EngineError, match="No such file or directory, although it was readable"):
        pixels_of(of_path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_each_format(kind):
    media = read_picture(file_of(PICTURE, kind))
    assert (media.width, media.height) == (6, 4)
    assert np.abs(np.frombuffer(pixels_of(media), np.uint8).reshape(4, 6, 3).astype(int) - RED).max() < 12


def test_what_is_transparent_is_white_and_turned_pictures_are_upright():
    clear = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    assert pixels_of(read_picture(file_of(clear))) == b"\xff" * 6
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF: rotated by 90 degrees
    turned = read_picture(file_of(PICTURE, "JPEG", exif=exif))
    assert (turned.width, turned.height) == (4, 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "a picture is empty"),
        (b"no picture", "a picture is in no known format; known are PNG, JPEG, WEBP, GIF, BMP"),
        (file_of(Image.effect_noise((64, 64), 90))[:2000], "a picture cannot be decoded: "),
        (png_header(30_000, 30_000), "more than 50,000,000 pixels"),
        (png_header(8_000, 8_000), "8000 x 8000 pixels; allowed are 1 to 16,384 a side"),
        ("missing.png", "the picture missing.png cannot be read: No such file"),
        ("https://example.org/a.png", "only from hosts in allowed_media_domains: example.org is none"),
        ("file:///etc/hostname", "files are read only below allowed_local_media_path"),
        ("data:image/png;base64,??", "is no base64"),
        ("data:image/png,abc", "with the bytes in base64"),
        (np.zeros((4, 4), np.uint8), "height x width x 3 of uint8"),
        (np.zeros((4, 4, 3), np.float32), "height x width x 3 of uint8"),
        (7, "give a path, bytes, a data: address"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(given, message):
    with pytest.raises(PromptError) as raised:
        read_picture(given)
    assert message in str(raised.value).replace("\n", " ").replace(str(__file__), "")
    assert "object at 0x" not in str(raised.value)


def test_sixteen_bits_become_eight():
    values = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    media = read_picture(file_of(Image.fromarray(values)))
    assert np.array_equal(np.frombuffer(pixels_of(media), np.uint8)[::3], (values >> 8).ravel())


def test_a_damaged_image_of_pillow_is_the_error_of_its_request():
    with pytest.raises(PromptError, match="a PIL image cannot be decoded"):
        read_picture(Image.open(io.BytesIO(file_of(Image.effect_noise((64, 64), 90))[:2000])))


def test_the_pixels_of_a_conversation_are_bounded_before_they_are_decoded(monkeypatch):
    decoded = []
    monkeypatch.setattr(Image.Image, "tobytes", lambda image, *_: decoded.append(image.size) or b"")
    parts = [{"type": "image", "image": png_header(5000, 5000)}] * 4
    with pytest.raises(PromptError, match="5000 x 5000 pixels; allowed are"):
        pictures_in([{"role": "user", "content": [{"type": "image", "image": Image.new("1", (8000, 6000))}, *parts]}])
    assert decoded == [(8000, 6000)]


def test_pictures_of_a_conversation_in_the_words_of_all():
    data = file_of(PICTURE)
    address = "data:image/png;base64," + base64.b64encode(data).decode()
    source = {"type": "base64", "media_type": "image/png", "data": address.partition(",")[2]}
    parts = [
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "image_url", "image_url": address},
        {"type": "input_image", "image_url": address},
        {"type": "image", "image": PICTURE},
        {"type": "image", "source": source},
        {"type": "image_pil", "image_pil": PICTURE},
        {"type": "image", "url": address},
        {"type": "image", "image": data},
    ]
    conversation = [{"role": "user", "content": [{"type": "text", "text": "Look"}, *parts]}]
    assert has_media(conversation)
    messages, _, mark = marked(conversation)
    pictures = pictures_in(conversation)
    assert len(pictures) == len(parts)
    assert len({picture.digest for picture in pictures}) == 1
    assert [part.get("media_mark") for part in messages[0]["content"][1:]] == [mark] * len(parts)
    assert mark != marked(conversation)[2]
    assert not has_media([{"role": "user", "content": "Look"}])


@pytest.mark.parametrize("kind", ["image_url", "input_image"])
@pytest.mark.parametrize(
    "address", ["a.png", "/etc/hostname", "file:///etc/hostname", "http://127.0.0.1/a.png", 7, None]
)
def test_the_address_of_a_part_is_neither_fetched_nor_read(kind, address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PICTURE.save("a.png")
    with pytest.raises(PromptError, match=r"has the address|has no picture"):
        pictures_in([{"role": "user", "content": [{"type": kind, "image_url": address}]}])


def test_so_many_media_of_a_prompt_and_no_more_and_none_for_nobody():
    with pytest.raises(PromptError, match="has 257 pictures and sounds; allowed are up to 256"):
        MediaInput(257, pictures=True, rate=0)
    given = MediaInput(2, pictures=True, rate=0, cancelled=lambda: True)
    with pytest.raises(CancelledError):
        given.add(file_of(PICTURE))


def test_pixels_in_a_cell_of_a_data_frame():
    pixels = np.asarray(PICTURE)
    for cell in (pixels, pixels.tolist()):
        [part] = parts_of_cell(cell)
        assert read_picture(part["image"]) == read_picture(PICTURE)
    assert len(parts_of_cell([pixels, pixels])) == 2


def test_a_prompt_behind_other_tokens_takes_its_pictures_along():
    prompt = Prompt("text", (1, 2, -5, -6, 3), (), (MediaRun(2, 2, 0, 0, True, 2, 2),))
    whole = prompt.behind((7, 8, 9), n_dropped=1)
    assert whole.token_ids == (7, 8, 9, 2, -5, -6, 3)
    assert [(run.start, run.end) for run in whole.media_runs] == [(4, 6)]


def test_cells_of_equal_pictures_have_equal_ids_and_others_not():
    first, second = cell_ids("a", 0, 100), cell_ids("a", 1, 100)
    assert first == cell_ids("a", 0, 100)
    assert not set(first) & set(second)
    assert all(-(2**31) <= each < 0 for each in first)
