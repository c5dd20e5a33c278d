"""Defects of the parts that have no file of their own here."""

from __future__ import annotations

from tests.defects import Defect

DEFECTS = (
    Defect(
        what="llama_cpp's max_tokens=0, which means no limit, is refused",
        file="llamabatch/compat/completion.py",
        old="most = room if args.max_tokens is None or args.max_tokens <= 0 else",
        new="most = room if args.max_tokens is None or args.max_tokens < 0 else",
        tests=("tests/unit/compat/test_llama.py", "tests/model/test_compat.py"),
    ),
    Defect(
        what="a general default in config.toml goes before that of the command's own section",
        file="llamabatch/cli/config_file.py",
        old='key=lambda each: each.section != ""',
        new='key=lambda each: each.section == ""',
        tests=("tests/unit/cli/test_config_file.py",),
    ),
    Defect(
        what="the median of three times in the summary of a job is the least of them",
        file="llamabatch/utils/histogram.py",
        old="if seen >= wanted:",
        new="if seen + 1 >= wanted:",
        tests=("tests/unit/jobs/test_summary.py", "tests/unit/engine/test_engine_stats.py"),
    ),
    Defect(
        what="the mark that ends the thinking stands in the text where it comes in several pieces",
        file="llamabatch/chat/output_parser.py",
        old="range(min(len(mark) - 1, len(text)), longest, -1)",
        new="range(min(len(mark), len(text)) - 1, longest, -1)",
        tests=("tests/unit/chat/test_output_parser.py", "tests/unit/client/test_front_parsing.py"),
    ),
    Defect(
        what="the token of the hub goes to any host whose name ends like the hub's, as evilhuggingface.co",
        file="llamabatch/gguf/download.py",
        old="if host != urlsplit(_hub()).hostname or (",
        new='if not host.endswith(urlsplit(_hub()).hostname or "") or (',
        tests=("tests/unit/gguf/test_download.py",),
    ),
    Defect(
        what="after some requests with n=4 have ended, an idle engine refuses new ones as if its queue were full",
        file="llamabatch/client/request_table.py",
        old="self._n_copies[one.background] -= one.n_copies",
        new="self._n_copies[one.background] -= 1",
        tests=(
            "tests/unit/client/test_front_queue.py",
            "tests/unit/client/test_front_client.py",
            "tests/model/test_queueing.py",
        ),
    ),
    Defect(
        what="vectors of tokens (pooling='none') are not of length 1 where normalize asks for it",
        file="llamabatch/entrypoints/submission.py",
        old="np.linalg.norm(vector, axis=-1, keepdims=True)",
        new="np.linalg.norm(vector, keepdims=True)",
        tests=("tests/model/test_encoders.py", "tests/model/test_embeddings.py"),
    ),
    Defect(
        what="the last token of a run in bad_words stays forbidden for good once the rest of the run has come",
        file="llamabatch/sampling/token_masks.py",
        old="words = self._always.copy()",
        new="words = self._always",
        tests=("tests/unit/sampling/test_token_masks.py", "tests/model/test_stops.py"),
    ),
    Defect(
        what="score() never returns where continuations of two tokens share a prompt of 32 or more",
        file="llamabatch/request/sequence.py",
        old="return most if record is None or record.prompt_is_read else min(most, record.next_row)",
        new="return most if record is None or record.prompt_is_read else min(most, record.next_row + 1)",
        tests=("tests/unit/scheduler/test_logprobs_kept.py", "tests/model/test_scoring.py"),
    ),
    Defect(
        what="an engine loads a prefix saved with another rope_freq_base, and answers from cells that do not fit",
        file="llamabatch/llama/kv_state.py",
        old='"changes": json.dumps(changes) if changes else None,',
        new='"changes": json.dumps(sorted(changes)) if changes else None,',
        tests=("tests/model/test_saved_prefixes.py", "tests/model/test_overrides.py"),
    ),
)
