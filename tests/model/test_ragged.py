"""One pass computes any tokens of any slots of a split cache, and gives each row the bits that it has alone."""

import ctypes
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import equal_bits
from llamabatch import SamplingParams
from llamabatch.config import EngineConfig
from llamabatch.engine.engine import Engine
from llamabatch.gguf.resolve import resolve
from llamabatch.llama import library
from llamabatch.llama.model import Model
from llamabatch.request.request import Request
from llamabatch.tools.synth import write_model
from tests.model import architectures

pytest.importorskip("gguf")
needs_patch = pytest.mark.skipif(
    not library._has_patch(library.RAGGED_PATCH), reason="llama.cpp is not our build with 0011"
)
SLOTS, UBATCH = 9, 64
F16, Q8_0 = 1, 8  # values of ggml_type


class Rows:
    """A llama_context that decodes (slot, position, token) in any order. Every token is an output."""

    def __init__(self, model, n_slots, n_ubatch, kv_type, n_threads=1):
        self.lib = lib = library.load()
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 1280 * n_slots, 2048, n_ubatch, n_slots
        params.n_outputs_max, params.n_threads, params.n_threads_batch = 2048, n_threads, n_threads
        params.kv_unified, params.flash_attn_type, params.type_k, params.type_v = False, 1, kv_type, kv_type
        self.passes = 0
        self._watch = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(self._count)
        params.cb_eval = ctypes.cast(self._watch, type(params.cb_eval))
        self.handle = lib.llama_init_from_model(model.handle, params)
        self.n_vocab = model.n_vocab

    def _count(self, tensor, ask, _data):
        # The struct contains the tensor's name. llama.cpp asks once for each node; each graph has one "result_norm".
        self.passes += ask and ctypes.string_at(tensor, 400).find(b"result_norm\0") >= 0
        return False

    def decode(self, rows):
        batch = self.lib.llama_batch_init(len(rows), 0, 1)
        for i, (slot, position, token) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
            batch.seq_id[i][0] = slot
        batch.n_tokens = len(rows)
        assert self.lib.llama_decode(self.handle, batch) == 0
        logits = np.ctypeslib.as_array(self.lib.llama_get_logits(self.handle), (len(rows), self.n_vocab))
        found = [row.tobytes() for row in logits]
        self.lib.llama_batch_free(batch)
        return found

    def close(self):
        self.lib.llama_free(self.handle)


def batches(rng, texts):
    """Yields the rows of each call, sometimes not in the order of the slots.

    About half of the calls have chunks of 1 to 200 tokens of most texts. The others have one row of each of two texts,
    so that calls of the same size have different slots.
    """
    at = dict.fromkeys(texts, 0)
    while left := [slot for slot in sorted(texts) if at[slot] < len(texts[slot])]:
        pair = rng.sample(left, 2) if len(left) > 1 and rng.random() < 0.5 else []
        rows = []
        for slot in left:
            size = rng.choice([1, 1, 2, 7, 10, 33, 200]) if rng.random() < 0.8 else 0
            size = size if not pair else int(slot in pair)
            chunk = range(at[slot], min(at[slot] + size, len(texts[slot])))
            rows += [(slot, position, texts[slot][position]) for position in chunk]
            at[slot] = max(at[slot], chunk.stop)
        if rng.random() < 0.3:
            order = rng.sample([row[0] for row in rows], len(rows))
            each = {slot: iter([row for row in rows if row[0] == slot]) for slot in texts}
            rows = [next(each[slot]) for slot in order]
        if rows:
            yield rows


@pytest.fixture(scope="module", params=["tiny", "one head a KV head"])
def model(request, tmp_path_factory):
    path = resolve("tiny")
    if request.param != "tiny":
        shape = replace(equal_bits.SHAPE, n_embd=256, n_ff=256, n_head=4, n_head_kv=4, n_ctx=2048)
        path = tmp_path_factory.mktemp("models") / "heads.gguf"
        write_model(shape, path, "Q8_0")
    model = Model(path, EngineConfig("tiny"))
    yield model
    model.close()


@needs_patch
@pytest.mark.parametrize(("kv_type", "n_threads"), [(F16, 1), (Q8_0, 2)])
def test_rows_of_any_slots_share_a_pass_and_have_the_bits_that_each_has_alone(model, kv_type, n_threads):
    rng = random.Random(kv_type)
    lengths = [1, 3, 40, 130, 300, 560]  # attention splits the keys of the last one into ranges
    slots = rng.sample(range(SLOTS), len(lengths))
    texts = {slot: [rng.randrange(300, 1500) for _ in range(n)] for slot, n in zip(slots, lengths, strict=True)}
    alone = Rows(model, 1, 512, kv_type)
    wanted = {}
    for slot, text in texts.items():
        alone.lib.llama_memory_clear(alone.lib.llama_get_memory(alone.handle), False)
        wanted[slot] = alone.decode([(0, position, token) for position, token in enumerate(text)])
    alone.close()
    together = Rows(model, SLOTS, UBATCH, kv_type, n_threads)
    try:
        for rows in batches(rng, texts):
            together.passes = 0
            found = together.decode(rows)
            assert together.passes <= -(-len(rows) // UBATCH)
            for (slot, position, _), logits in zip(rows, found, strict=True):
                assert logits == wanted[slot][position], (slot, position)
    finally:
        together.close()


def is_ragged(model, **options):
    """Answers prompts of unequal lengths, and returns Limits.is_ragged of the engine."""
    asked = {"n_ctx": 256, "n_slots": 3, "n_threads": 1, "n_threads_batch": 1, "trial": "off", **options}
    with Engine(EngineConfig(str(model), **asked)) as engine:
        for i, length in enumerate([3, 40, 9, 17]):
            engine.add(Request(f"r{i}", tuple([5 + i] * length), SamplingParams(max_tokens=2, ignore_eos=True)))
        ended = []
        while len(ended) < 4:
            ended += [output.finished for output in engine.step() if output.finished is not None]
        assert all(output.error is None for output in ended)
        return engine._runner.limits.is_ragged


@needs_patch
@pytest.mark.parametrize(
    "options",
    [{"kv": "unified"}, {"flash_attn": "off"}, {"type_k": "q4_0"}, {"type_k": "f32"}],
    ids=["unified", "no flash attention", "q4_0", "f32"],
)
def test_a_context_of_another_form_takes_equal_lengths_alone(options):
    assert not is_ragged("tiny", **options)


@needs_patch
@pytest.mark.parametrize("kind", ["gemma2", "mamba", "jamba", "deepseek2"])
def test_windows_recurrent_state_and_compressed_keys_take_equal_lengths_alone(tmp_path, kind):
    assert not is_ragged(architectures.write(kind, tmp_path / "model.gguf"))


@needs_patch
def test_a_context_that_starts_with_one_slot_and_grows_is_ragged():
    assert is_ragged("tiny", start_slots=1)
