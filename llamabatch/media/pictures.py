"""Pictures: makes a Media of a picture, and decodes the pixels with Pillow. First checks the size in the header."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from llamabatch.errors import PromptError, SetupError, describe
from llamabatch.media.files import Decode, at_address, is_address, media_at, media_of, raw_of
from llamabatch.media.sources import NOWHERE, MediaSources
from llamabatch.request.media import IMAGE, Media
from llamabatch.utils.checks import show

MAX_SIDE = 16_384
MAX_PIXELS = 50_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_WHITE = (255, 255, 255, 255)


def read_picture(given: Any, most: int = MAX_PIXELS, sources: MediaSources = NOWHERE) -> Media:
    """Returns the Media of a picture. Decodes the picture once as a check.

    Args:
        given: a path, a data: address, the bytes of a file, a PIL image, or an array of height x width x 3, uint8.
        most: the maximum number of pixels, up to MAX_PIXELS.
        sources: as for read_address.

    Raises:
        PromptError: the picture cannot be read, is too large, or its format is unknown.
        SetupError: Pillow is needed and not installed.
    """
    if isinstance(given, (bytes, bytearray, memoryview)):
        return media_of(IMAGE, bytes(given), "a picture", _decoder(most))
    if isinstance(given, str) and is_address(given):
        return read_address(given, most, sources)
    if isinstance(given, (str, os.PathLike)):
        return media_at(given, IMAGE, "the picture", _decoder(most))
    if hasattr(given, "convert") and hasattr(given, "size"):  # tested first: the next test would decode a PIL image
        return Media(*_decoded(lambda: given, "a PIL image", most))
    if hasattr(given, "__array_interface__") and hasattr(given, "dtype"):
        return _of_array(given, most)
    raise PromptError(
        f"a picture is {show(given)}; give a path, bytes, a data: address, a PIL image, or an array of height x width "
        "x 3"
    )


def read_address(address: Any, most: int = MAX_PIXELS, sources: MediaSources = NOWHERE) -> Media:
    """Returns the Media of a picture at an address. Raises the errors of read_picture and at_address."""
    return media_of(IMAGE, at_address(address, "a picture", sources), "a picture", _decoder(most))


def pixels_of(media: Media) -> bytes:
    """Returns the pixels row by row, 3 bytes per pixel. Raises the errors of raw_of."""
    return raw_of(media, "picture", _decoder(MAX_PIXELS))


def _decoder(most: int) -> Decode:
    def decode(data: bytes, name: str) -> tuple[bytes, int, int]:
        pillow = _pillow()
        return _decoded(lambda: pillow.open(io.BytesIO(data), formats=FORMATS), name, most)

    return decode


def _decoded(opened: Callable[[], Any], name: str, most: int) -> tuple[bytes, int, int]:
    """Returns pixels, width and height of a PIL image: the first frame, rotated as EXIF says, on a white background.

    Args:
        opened: opens the image and reads its header.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = opened()
        width, height = image.size
        _check_size(width, height, most)
        image = ImageOps.exif_transpose(image)
        if image.mode in ("I", "F"):
            raise PromptError(f"{name} has pixels of 32 bits; give 8 or 16")
        if image.mode.startswith("I;16"):
            image = image.convert("I").point(lambda value: value / 256).convert("L")
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image)
        image = image.convert("RGB")
        return image.tobytes(), *image.size
    except PromptError:
        raise
    except UnidentifiedImageError as error:
        raise PromptError(f"{name} is in no known format; known are {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise PromptError(f"{name} has more than {MAX_PIXELS:,} pixels") from error
    except Exception as error:  # decoders raise many kinds of errors
        raise PromptError(f"{name} cannot be decoded: {describe(error)}") from error


def _of_array(array: Any, most: int) -> Media:
    if getattr(array, "ndim", 0) != 3 or array.shape[2] != 3 or str(array.dtype) != "uint8":
        form = f"{getattr(array, 'shape', ())} of {array.dtype}"
        raise PromptError(f"a picture is an array of shape {form}; give height x width x 3 of uint8")
    height, width, _ = array.shape
    _check_size(width, height, most)
    return Media(array.tobytes(), width, height)


def _check_size(width: int, height: int, most: int) -> None:
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE) or width * height > min(most, MAX_PIXELS):
        left = "" if most >= MAX_PIXELS else f", {max(0, most):,} after the pictures before it"
        raise PromptError(
            f"a picture has {width} x {height} pixels; allowed are 1 to {MAX_SIDE:,} a side, and {MAX_PIXELS:,} in all"
            f"{left}"
        )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise SetupError("pictures in files need Pillow: pip install 'llamabatch[images]'") from error
    return Image
