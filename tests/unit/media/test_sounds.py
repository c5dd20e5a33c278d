"""Sounds in all forms are decoded to samples. Their length is bounded while they are decoded."""

import base64
import io
import wave

import numpy as np
import pytest

from llamabatch.errors import EngineError, PromptError
from llamabatch.media.parts import MediaInput, parts_of_cell
from llamabatch.media.sounds import is_sound, read_sound, samples_of
from llamabatch.request.media import IMAGE, SOUND

RATE = 16_000
MOST = 60 * RATE
TONE = (12_000 * np.sin(np.arange(RATE) / 20)).astype(np.int16)


def wav(samples: np.ndarray = TONE, rate: int = RATE) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return data.getvalue()


def test_each_form_of_a_sound_gives_the_same(tmp_path, monkeypatch):
    (tmp_path / "a b.wav").write_bytes(wav())
    monkeypatch.chdir(tmp_path)
    address = "data:audio/wav;base64," + base64.b64encode(wav()).decode()
    samples = TONE / np.float32(32768)
    forms = [wav(), "a b.wav", tmp_path / "a b.wav", address, (TONE, RATE), (samples, RATE), bytearray(wav())]
    forms += [{"array": samples, "sampling_rate": RATE}, (np.stack([samples, samples]), RATE)]
    found = [read_sound(form, RATE, MOST) for form in forms]
    assert len({each.digest for each in found}) == 1
    assert {(each.kind, each.width, each.height) for each in found} == {(SOUND, RATE, 1)}
    assert all(np.allclose(np.frombuffer(samples_of(each, RATE), np.float32), samples) for each in found)
    assert found[1].data == str(tmp_path / "a b.wav")
    (tmp_path / "a b.wav").write_bytes(wav(TONE[::-1].copy()))
    with pytest.raises(EngineError, match="has changed since it was given"):
        samples_of(found[1], RATE)


def test_other_rates_and_several_channels_are_converted():
    slow = read_sound(wav(TONE[::2].copy(), RATE // 2), RATE, MOST)
    assert abs(slow.width - RATE) < 100
    array = read_sound((TONE[::2] / 32768, RATE // 2), RATE, MOST)
    assert abs(array.width - RATE) < 100
    both = read_sound(wav(np.stack([TONE, -TONE], 1)), RATE, MOST)
    assert np.abs(np.frombuffer(samples_of(both, RATE), np.float32)).max() < 1e-3  # the two channels cancel each other


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "a sound is empty"),
        (b"RIFF....WAVE", "a sound cannot be decoded: "),
        (b"OggS" + wav(), "a sound is in no known format; known are WAV, MP3, FLAC"),
        (wav()[:40], "cannot be decoded|has 0.000 s"),
        (wav(TONE[:100]), r"a sound has 0\.006 s; allowed are 0\.1 to 1,800 s"),
        (wav(np.zeros(61 * RATE, np.int16)), "a sound is longer than allowed"),
        (wav(np.zeros(100, np.int16), 1), "longer than allowed|cannot be decoded"),
        ("missing.wav", "the sound missing.wav cannot be read: No such file"),
        (
            "https://example.org/a.wav",
            "a sound has the address 'https://example.org/a.wav'; addresses are",
        ),
        ((TONE, 0), "the rate of a sound is 0; give samples a second, 1,000 to 768,000"),
        ((TONE, "a"), "the rate of a sound is 'a'"),
        ((np.zeros((2, 2, 2)), RATE), "a sound is an array of shape"),
        ((np.full(RATE, np.nan), RATE), "a sound has a sample of nan; allowed are -16 to 16"),
        ((np.zeros(61 * RATE, np.float32), RATE), "a sound is longer than allowed"),
        ((np.full(RATE, 1e30), RATE), r"a sample of 1e\+30"),
        ((np.zeros((RATE, 2)), RATE), r"array of shape \(16000, 2\) of float64; give"),
        (7, "a sound is 7; give a path, bytes"),
    ],
)
def test_what_is_no_sound_is_refused_by_name(given, message):
    with pytest.raises(PromptError, match=message):
        read_sound(given, RATE, MOST)


def test_bytes_tell_what_they_are():
    assert all(map(is_sound, [wav(), b"ID3\3", b"\xff\xfb\x90", b"fLaC"]))
    assert not any(map(is_sound, [b"", b"\x89PNG", b"\xff\xd8\xff\xe0", b"RIFF....WEBP", b"GIF89a", b"BM"]))
    given = MediaInput(4, pictures=False, rate=RATE)
    given.add(wav())
    given.add_part({"type": "input_audio", "input_audio": {"data": base64.b64encode(wav()).decode(), "format": "wav"}})
    given.add_part({"type": "audio", "audio": (TONE, RATE)})
    assert len({each.digest for each in given.media}) == 1
    with pytest.raises(PromptError, match="reads sounds only"):
        given.add(b"\x89PNG")
    with pytest.raises(PromptError, match="reads pictures only"):
        MediaInput(1, pictures=True, rate=0).add(wav())
    for part in ({"type": "audio_url", "audio_url": "/etc/hostname"}, {"type": "input_audio", "input_audio": "a.wav"}):
        with pytest.raises(PromptError, match=r"has the address|has no sound"):
            given.add_part(part)


def test_sounds_in_the_cells_of_a_table():
    pair = (TONE, RATE)
    array = {"array": TONE, "sampling_rate": RATE, "path": "a.wav"}
    assert parts_of_cell(pair, SOUND) == [{"type": "audio", "audio": pair}]
    assert parts_of_cell(array, SOUND) == [{"type": "audio", "audio": array}]
    assert parts_of_cell({"bytes": b"a", "path": "a.wav"}, SOUND) == [{"type": "audio", "audio": b"a"}]
    assert len(parts_of_cell(["a.wav", pair, None], SOUND)) == 2
    assert parts_of_cell(None, IMAGE) == []
