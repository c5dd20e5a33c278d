"""Flags of llama-server and vLLM: the table is complete, each name has one meaning, and values become ours."""

import contextlib
import json
import re
import tarfile
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.cli import cli, flag_table
from llamabatch.cli.config_file import parse_toml
from llamabatch.cli.flag_table import LLAMA, MANY, VLLM
from llamabatch.cli.serve_flags import BY_NAME, ROWS, from_environment, meaning, translate
from llamabatch.native_build.source import FILE_NAME
from llamabatch.utils.paths import cache_dir

# Names, number of values and variables of llama-server's options, as its --help has them at the commit that the
# binding builds: the table between HELP_START and HELP_END of tools/server/README.md, which common/arg.cpp writes.
THEIRS = json.loads((Path(__file__).parent / "llama_server_flags.json").read_text(encoding="utf-8"))
OWN = {"--n-ctx": 1, "--strict": 0, "--port": 1, "-P": 1}


def ours(line, own=OWN):
    return translate(line.split(), own).args


def test_every_flag_of_llama_server_has_a_row():
    for option in THEIRS:
        for name in option["names"]:
            row, _ = BY_NAME[name]
            assert (row.program, row.takes) == (LLAMA, option["values"]), name


def test_the_table_has_no_misspelt_key_and_no_unused_text():
    path = Path(flag_table.__file__).with_name("flags.toml")
    text = path.read_text(encoding="utf-8")
    table = parse_toml(text)
    entries = [entry for program in (LLAMA, VLLM) for entry in table[program].values() if isinstance(entry, dict)]
    known = {"to", "skip", "values", "call", "on", "off", "auto", "env", "note", "cure", "fine", "field"}
    assert {key for entry in entries for key in entry} <= known
    assert set(table) == {"texts", LLAMA, VLLM}
    used = {str(entry.get(key, "")) for entry in entries for key in ("note", "cure")}
    assert {f"@{name}" for name in table["texts"]} <= used
    assert set(re.findall(r"\{(\w+)\}", text.partition("[texts]")[2])) == {*flag_table.VALUES} - {""}
    assert {entry["call"] for entry in entries if "call" in entry} == {*flag_table.CALLS}


def test_every_variable_of_llama_server_has_a_row():
    known = {"", *(name for row in ROWS for name in row.env.split())}
    assert {option["env"] for option in THEIRS} - known == {"HF_TOKEN"}  # huggingface_hub reads it itself


def test_the_list_is_that_of_the_source_that_is_built():
    archive = cache_dir() / "sources" / FILE_NAME
    if not archive.is_file():
        pytest.skip("the source of llama.cpp is not in the cache")
    with tarfile.open(archive) as tar:
        readme = next(each for each in tar if each.name.endswith("/tools/server/README.md"))
        text = tar.extractfile(readme).read().decode()
    table = text[text.index("<!-- HELP_START") : text.index("<!-- HELP_END")]
    found = []
    for head, told in re.findall(r"^\| `([^`]*)` \| (.*) \|$", table, flags=re.M):
        names = re.findall(r"(?:^|, )(-{1,2}[A-Za-z][\w.-]*)", head)
        value = re.sub(r"(?:^|, )-{1,2}[A-Za-z][\w.-]*", "", head).strip()
        env = re.search(r"\(env: (\w+)\)", told)
        count = 0 if not value else 2 if value == "START END" else 1
        found.append({"names": names, "values": count, "env": env[1] if env else ""})
    assert found == THEIRS


def test_a_row_says_one_thing_and_names_options_that_exist():
    command = cli.command_of("serve")
    flags = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)} | {
        *("--hf-token", "--rpc", "--offline", "--help"),
    }
    samples = ("8", "0.5", "on", "mmap", "ngram-simple", "fp16", "x=y", '{"method": "ngram"}')
    for row in ROWS:
        given = {arg for arg in (*row.on, *row.off) if arg.startswith("-")}
        for sample in (*row.fine, *samples) if row.args is not None else ():
            with contextlib.suppress(click.UsageError):
                given |= {arg for arg in row.args(sample) if arg.startswith("--") and arg != sample}
        assert given <= flags, row.names
        assert meaning(row), row.names
        assert not (row.note and row.cure) or row.fine, row.names


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("-m x.gguf", "--model x.gguf"),
        ("-c 4096 -np 4", "--ctx-size 4096 --n-slots 4"),
        ("-np -1 -t -1 --threads 3", "--n-threads 3"),
        ("-ngl all --n_gpu_layers 7", "--n-gpu-layers -1 --n-gpu-layers 7"),
        ("-dev none -sm none -mg 1", "--devices none --split-mode none --main-gpu 1"),
        ("-nkvo --no-op-offload", "--no-offload-kqv --no-op-offload"),
        ("-fa", "--flash-attn on"),
        ("-fa off -cb --port 1", "--flash-attn off --port 1"),
        ("-fa --port 1", "--flash-attn on --port 1"),
        ("--no-mmap --mlock", "--no-use-mmap --use-mlock"),
        ("--no-webui --no-slots", "--no-page --no-slots"),
        ("--temp 0.2 --repeat-penalty 1.1", "--temperature 0.2 --repetition-penalty 1.1"),
        ("--mirostat 2 --mirostat 1 --mirostat-ent 4", "-P mirostat=1 -P mirostat_tau=4"),
        ("--lora-scaled a.gguf:0.5,b.gguf", "--lora a.gguf=0.5 --lora b.gguf"),
        ("--lora a.gguf,b.gguf", "--lora a.gguf --lora b.gguf"),
        ("-l 15043+1 -l 3-2.5", "--logit-bias 15043=1 --logit-bias 3=-2.5"),
        ("--rope-scale 4", "--rope-freq-scale 0.25"),
        ("-to 20", "--body-timeout-s 20 --write-timeout-s 20"),
        ("--sse-ping-interval -1", "--sse-ping-s 0"),
        ("--alias mine --no-jinja", "--served-model-name mine --any-model"),
        ("-rea on --reasoning off --reasoning auto", "--enable-thinking --no-enable-thinking --enable-thinking"),
        ("--reasoning-budget -1 --reasoning-budget 9", "-P thinking_token_budget=9"),
        ("-cram -1 --cache-ram 100 --cache-ram=-1", "--cache-ram auto --cache-ram 100 --cache-ram auto"),
        ("-md d.gguf --draft-max 4", "--speculate draft --draft-model d.gguf --n-draft 4"),
        ("--max-model-len 8k --max-num-seqs=3", "--n-ctx 8000 --n-slots 3"),
        ("--max_model_len=8K", "--n-ctx 8192"),
        ("--served-model-name a b --port 3", "--served-model-name a --served-model-name b --port 3"),
        ("--api-key a b", "--api-key a --api-key b"),
        ("--lora-modules a=x b=y", "--lora-module a=x --lora-module b=y"),
        ("--data-parallel-size 2", "--strategy multi-instance --instances 2"),
        ("MODEL --dtype auto --enable-prefix-caching", "MODEL --cache-prefix"),
        ("--tensor-parallel-size 1 --no-agent", ""),  # the server does this anyway
        ("--n-ctx 64 --strict --n-ctx=8", "--n-ctx 64 --strict --n-ctx=8"),
        ("--unknown -x", "--unknown -x"),
        ("-- -c 8", "-- -c 8"),
    ],
)
def test_a_line_becomes_ours(line, wanted):
    assert ours(line) == wanted.split()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--tensor-parallel-size 2", "--tensor-parallel-size 2: give --tensor-split"),
        ("--log-prompts-dir x", "never writes prompts down"),
        ("--chat-template", "--chat-template needs a value"),
        ("--api-key", "--api-key needs a value"),
        ("--spec-type draft-eagle3", "--spec-type draft-eagle3: 'draft-eagle3' is not supported"),
        ("--kv-cache-dtype fp8", "no type that llama.cpp has"),
        ("--speculative-config {", "no JSON object"),
        ("--rope-scale 0", "no number above 0"),
        ("--grammar-file /nothing", "cannot be read"),
        ("--flash-attn=maybe", "none of on, off and auto"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(line, told):
    with pytest.raises(click.UsageError) as caught:
        ours(line)
    assert told in caught.value.message


def test_flags_without_effect_say_so_in_one_line():
    found = translate(["--prio", "2", "--poll", "50", "-ctxcp", "8"], OWN)
    assert found.args == []
    assert [note.split(" has no effect: ")[0] for note in found.notes] == ["--prio", "--poll", "-ctxcp"]


def test_tokens_and_offline_are_variables():
    found = translate(["-hft", "secret", "--offline"], OWN)
    assert (found.args, found.environ) == ([], {"HF_TOKEN": "secret", "HF_HUB_OFFLINE": "1"})


def test_variables_of_llama_server():
    found = from_environment(
        {
            "LLAMA_ARG_CTX_SIZE": "8192", "LLAMA_ARG_FLASH_ATTN": "on", "LLAMA_ARG_NO_MMAP": "anything",
            "LLAMA_ARG_ENDPOINT_PROPS": "1", "LLAMA_ARG_CONT_BATCHING": "0", "LLAMA_ARG_ENDPOINT_SLOTS": "off",
            "LLAMA_ARG_THREADS": "", "OTHER": "x",
        }
    )  # fmt: skip
    assert found.args == ["--ctx-size", "8192", "--flash-attn", "on", "--no-use-mmap", "--props", "--no-slots"]
    for off in ({"LLAMA_ARG_NO_WEBUI": "1"}, {"LLAMA_ARG_WEBUI": "0"}, {"LLAMA_ARG_UI": "false"}):
        assert from_environment(off).args == ["--no-page"]
    assert from_environment({"LLAMA_ARG_MMPROJ": "x"}).args == ["--mmproj", "x"]
    with pytest.raises(click.UsageError, match="LLAMA_ARG_SPEC_SYNTH_LEN 3: it is for benchmarks"):
        from_environment({"LLAMA_ARG_SPEC_SYNTH_LEN": "3"})


@given(st.lists(st.sampled_from([*BY_NAME, "1", "-1", "x", "=", "--", "{}", "--n-ctx"]), max_size=6))
def test_any_line_is_translated_or_refused(words):
    try:
        translate(words, OWN)
    except click.UsageError:
        return


def test_flags_with_several_values_are_vllms():
    assert all(row.program != LLAMA for row in ROWS if row.takes == MANY)
