"""Audio: makes a Media of an audio clip, and decodes the samples with miniaudio, as llama.cpp does. Decoding stops at
the maximum length."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from llamabatch.errors import PromptError, SetupError, describe
from llamabatch.media.files import Decode, at_address, is_address, media_at, media_of, raw_of
from llamabatch.media.sources import NOWHERE, MediaSources
from llamabatch.request.media import SOUND, Media
from llamabatch.utils.checks import show

LEAST_S, MOST_S = 0.1, 1800.0
"""Minimum and maximum length of an audio clip in seconds."""
FORMATS = ("WAV", "MP3", "FLAC")
# The first bytes of FLAC, and of MP3 with ID3 tags. Ogg Vorbis is left out, as in llama.cpp, because damaged Ogg files
# crash miniaudio.
_STARTS = (b"fLaC", b"ID3")
LOUDEST = 16.0
"""The largest absolute value of a sample. Full scale is 1."""
_PIECE = 2**16  # number of samples that are decoded at once
_MOST_CHANNELS = 64
_RATES = (1000, 768_000)
_SAMPLE_BYTES = 4
_FLOAT_WAV = 3  # WAVE_FORMAT_IEEE_FLOAT

Samples = npt.NDArray[np.float32]


def is_sound(data: bytes) -> bool:
    """Returns True for bytes that start as an audio file does. No picture file starts in this way."""
    is_mpeg = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06 != 0
    return is_mpeg or data.startswith(_STARTS) or (data.startswith(b"RIFF") and data[8:12] == b"WAVE")


def read_sound(given: Any, rate: int, most: int, sources: MediaSources = NOWHERE) -> Media:
    """Returns the Media of an audio clip. Decodes the clip once as a check.

    Args:
        given: a path, an address, the bytes of a file, a pair of samples and rate as in vLLM, or a mapping with array
            and sampling_rate as in Hugging Face datasets. Samples have the shape (samples,) or (channels, samples) and
            are floats, usually from -1 to 1, or int16. Channels are averaged.
        rate: samples per second that the model reads.
        most: the maximum number of samples at this rate.
        sources: as for at_address.

    Raises:
        PromptError: the clip cannot be read, is too short or too long, or its format is unknown.
        SetupError: miniaudio is needed and not installed.
    """
    if isinstance(given, (bytes, bytearray, memoryview)):
        return media_of(SOUND, bytes(given), "a sound", _decoder(rate, most))
    if isinstance(given, str) and is_address(given):
        return media_of(SOUND, at_address(given, "a sound", sources), "a sound", _decoder(rate, most))
    if isinstance(given, (str, os.PathLike)):
        return media_at(given, SOUND, "the sound", _decoder(rate, most))
    if isinstance(given, Mapping) and "array" in given:
        given = np.asarray(given["array"]), given.get("sampling_rate")
    if isinstance(given, (list, tuple)) and len(given) == 2 and hasattr(given[0], "dtype"):
        return _of_samples(given[0], given[1], rate, most)
    raise PromptError(
        f"a sound is {show(given)}; give a path, bytes, a data: address, or samples as an array with their rate"
    )


def samples_of(media: Media, rate: int) -> bytes:
    """Returns the samples as 32-bit floats. Raises the errors of raw_of."""
    return raw_of(media, "sound", _decoder(rate, int(MOST_S * rate)))


def _decoder(rate: int, most: int) -> Decode:
    def decode(data: bytes, name: str) -> tuple[bytes, int, int]:
        samples = _decoded(data, name, rate, most)
        return samples.tobytes(), len(samples), 1

    return decode


def _of_samples(array: Any, given_rate: Any, rate: int, most: int) -> Media:
    low, high = _RATES
    if not isinstance(given_rate, (int, float, np.integer)) or not low <= given_rate <= high:
        raise PromptError(f"the rate of a sound is {show(given_rate)}; give samples a second, {low:,} to {high:,}")
    samples = np.asarray(array)
    if samples.dtype == np.int16:
        samples = samples / np.float32(32768)
    is_turned = samples.ndim == 2 and samples.shape[0] > _MOST_CHANNELS
    if samples.ndim not in (1, 2) or is_turned or not np.issubdtype(samples.dtype, np.floating) or samples.size == 0:
        form = f"{samples.shape} of {samples.dtype}"
        raise PromptError(
            f"a sound is an array of shape {form}; give (samples,) or (channels, samples), floats or int16"
        )
    with np.errstate(over="ignore"):
        mono = samples.mean(0, np.float32) if samples.ndim == 2 else samples.astype(np.float32)
    _check_samples(mono, "a sound")
    if int(given_rate) == rate:
        _check_length(len(mono), "a sound", rate, most)
        return Media(mono.tobytes(), len(mono), 1, kind=SOUND)
    _check_length(int(len(mono) * rate / given_rate), "a sound", rate, most)
    return _of_bytes_of_wav(mono, int(given_rate), rate, most)


def _of_bytes_of_wav(samples: Samples, own_rate: int, rate: int, most: int) -> Media:
    """Returns the Media of samples. miniaudio reads them as a WAV file and converts `own_rate` to `rate`."""
    data = samples.tobytes()
    head = struct.pack("<4sI4s4sIHHIIHH4sI", *(b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, _FLOAT_WAV, 1), *(
        own_rate, own_rate * _SAMPLE_BYTES, _SAMPLE_BYTES, 8 * _SAMPLE_BYTES, b"data", len(data)
    ))  # fmt: skip
    found = _decoded(head + data, "a sound", rate, most)
    return Media(found.tobytes(), len(found), 1, kind=SOUND)


def _decoded(data: bytes, name: str, rate: int, most: int) -> Samples:
    miniaudio = _miniaudio()
    if not is_sound(data):
        raise PromptError(f"{name} is in no known format; known are {', '.join(FORMATS)}")
    try:
        pieces = miniaudio.stream_memory(
            data, miniaudio.SampleFormat.FLOAT32, nchannels=1, sample_rate=rate, frames_to_read=_PIECE
        )
        found: list[Samples] = []
        n = 0
        for piece in pieces:
            found.append(np.frombuffer(piece, np.float32))
            n += len(piece)
            if n > min(most, MOST_S * rate):
                break
    except Exception as error:  # MiniaudioError and others
        raise PromptError(f"{name} cannot be decoded: {describe(error)}") from error
    _check_length(n, name, rate, most)
    samples = np.concatenate(found)
    _check_samples(samples, name)
    return samples


def _check_samples(samples: Samples, name: str) -> None:
    """Raises PromptError for samples that are NaN or too large, because an encoder would return NaN."""
    largest = float(np.abs(samples).max())  # NaN if any sample is NaN
    if not largest <= LOUDEST:
        raise PromptError(f"{name} has a sample of {largest:g}; allowed are {-LOUDEST:g} to {LOUDEST:g}, usual -1 to 1")


def _check_length(n: int, name: str, rate: int, most: int) -> None:
    if n < LEAST_S * rate:
        raise PromptError(f"{name} has {n / rate:.3f} s; allowed are {LEAST_S:g} to {MOST_S:,.0f} s")
    if n > min(most, MOST_S * rate):
        left = "" if most >= MOST_S * rate else f", and {most / rate:,.0f} s after the media before it"
        raise PromptError(f"{name} is longer than allowed, {LEAST_S:g} to {MOST_S:,.0f} s{left}")


def _miniaudio() -> Any:
    try:
        import miniaudio
    except ImportError as error:
        raise SetupError("sounds in files need miniaudio: pip install 'llamabatch[sounds]'") from error
    return miniaudio
