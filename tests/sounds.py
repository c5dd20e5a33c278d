"""Writes sound files for tests."""

import wave
from pathlib import Path

import numpy as np

RATE = 16_000


def write_tone(path: Path, seconds: float = 1.0) -> None:
    """Writes a WAV file with a tone."""
    samples = (12_000 * np.sin(np.arange(int(seconds * RATE)) / 20)).astype(np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
