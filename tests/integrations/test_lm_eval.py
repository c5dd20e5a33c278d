"""lm_eval with llamabatch gives the same sums as with llama_cpp.Llama, in one call of the engine."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs lm_eval (make test-scale)")

import datasets
import lm_eval
import tqdm
from click.testing import CliRunner
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from benchmarks.evaluation import measure, requests
from llamabatch import LLM
from llamabatch.cli import cli
from llamabatch.errors import ConfigError, PromptError
from llamabatch.integrations.lm_eval import LlamaBatchLM
from llamabatch.testing import FakeLLM
from llamabatch.utils.paths import bundled_model
from tests.integrations.tasks import ENDINGS, questions, write_tasks

pytestmark = [
    pytest.mark.filterwarnings("default"),  # lm_eval and its imports warn
    pytest.mark.usefixtures("no_hub"),
]


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", n_slots=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def lm(llm):
    return LlamaBatchLM(llm)


def peer_of(flash_attn):
    """Returns a llama_cpp.Llama. Its own default is to compute without flash attention."""
    llama_cpp = pytest.importorskip("llama_cpp")
    return llama_cpp.Llama(str(bundled_model()), n_ctx=512, logits_all=True, verbose=False, flash_attn=flash_attn)


def asked(kind, *args):
    return Instance(request_type=kind, doc={}, arguments=args, idx=0)


def peer_logprobs(peer, tokens):
    """Returns the log softmax of llama_cpp.Llama's logits after each token."""
    peer.reset()
    peer.eval(tokens)
    logits = np.array(peer.scores[: len(tokens)], np.float64)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def peer_sum(peer, context, continuation):
    """Returns the sum of logprobs of the continuation's tokens, and whether each of these tokens is the likeliest."""
    tokens = peer.tokenize((context + continuation).encode(), special=True)
    first = len(peer.tokenize(context.encode(), special=True))
    if not context:
        tokens, first = [peer.token_bos(), *tokens], 1
    logprobs, places = peer_logprobs(peer, tokens), range(first, len(tokens))
    return sum(logprobs[i - 1, tokens[i]] for i in places), all(logprobs[i - 1].argmax() == tokens[i] for i in places)


@pytest.mark.parametrize("flash", ["on", "off"])
def test_sums_are_those_of_llama_cpp(flash):
    pairs = [(each["q"], ending) for each in questions() for ending in ENDINGS] + [("", "Once upon a time")]
    with LLM("tiny", n_slots=32, flash_attn=flash, batch_invariant=True) as llm:
        requests = [asked("loglikelihood", *pair) for pair in pairs]
        found = LlamaBatchLM(llm).loglikelihood(requests, disable_tqdm=True)
    peer = peer_of(flash == "on")
    for pair, (logprob, is_greedy) in zip(pairs, found, strict=True):
        expected, greedy = peer_sum(peer, *pair)
        assert logprob == pytest.approx(expected, abs=1e-3), pair
        assert is_greedy == greedy


def test_a_greedy_continuation_is_told(lm, llm):
    prompt = "Once upon a time"
    [text] = (each.text for each in llm.generate(prompt, {"temperature": 0.0, "max_tokens": 4}))
    [(_, greedy), (_, other)] = lm.loglikelihood(
        [asked("loglikelihood", prompt, text), asked("loglikelihood", prompt, " zebra")], disable_tqdm=True
    )
    assert greedy
    assert not other


def test_sums_over_texts_roll_in_windows():
    peer = peer_of(False)
    text = " ".join(each["q"] for each in questions(8))
    with LLM("tiny", n_ctx=32, flash_attn="off", batch_invariant=True) as short:
        lm = LlamaBatchLM(short)
        whole, parts = len(lm.tok_encode(text)), 0
        assert whole > 3 * 32
        [found] = lm.loglikelihood_rolling([asked("loglikelihood_rolling", text)], disable_tqdm=True)
        tokens = [lm.prefix_token_id, *lm.tok_encode(text)]
        expected = 0.0
        for context, continuation in windows(tokens, 32):
            parts += len(continuation)
            logprobs = peer_logprobs(peer, [*context, *continuation])[len(context) - 1 :]
            expected += sum(logprobs[i, token] for i, token in enumerate(continuation))
    assert parts == whole
    assert found == pytest.approx(expected, abs=1e-3)


def windows(tokens, n):
    """Yields (context, tokens to score) windows as lm_eval's guide draws them. Each token is scored once, and the last
    window has as much context as fits into n tokens."""
    yield tokens[:1], tokens[1:n]
    done = n
    while done < len(tokens):
        end = min(done + n - 1, len(tokens))
        yield tokens[end - n : done], tokens[done:end]
        done = end


def test_texts_are_those_of_the_library_and_end_before_a_stop(lm, llm):
    prompts = [each["q"] for each in questions()]
    kwargs = {"until": ["."], "max_gen_toks": 20, "do_sample": False}
    found = lm.generate_until([asked("generate_until", prompt, kwargs) for prompt in prompts], disable_tqdm=True)
    alone = [llm.generate(prompt, {"temperature": 0.0, "max_tokens": 20, "stop": ["."]})[0].text for prompt in prompts]
    assert found == alone
    assert any(found)


def test_all_requests_of_a_kind_are_one_call(lm, llm, monkeypatch, tmp_path):
    calls = []
    for name in ("score", "as_completed"):
        real = getattr(llm, name)
        monkeypatch.setattr(
            llm,
            name,
            lambda *args, _name=name, _real=real, **named: calls.append((_name, len(args[0]))) or _real(*args, **named),
        )
    tasks = TaskManager(include_path=str(write_tasks(tmp_path)))
    results = simple_evaluate(
        lm, tasks=["local_choice", "local_text", "local_roll"], task_manager=tasks, bootstrap_iters=0
    )
    assert sorted(calls) == [
        ("as_completed", 12),
        ("score", 1),
        ("score", 6),
    ]  # few contexts, each with many continuations
    assert set(results["results"]) == {"local_choice", "local_text", "local_roll"}
    assert results["config"]["n_slots"] == 32


def test_conversations_go_through_the_models_template(lm, llm):
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    assert lm.apply_chat_template(turns[:1]) == llm.apply_chat_template(turns[:1])
    prefilled = lm.apply_chat_template(turns, add_generation_prompt=False)
    assert prefilled.endswith("Hi")
    assert lm.tok_encode("<|im_start|>user")[0] == llm.vocab.id("<|im_start|>")
    assert lm.chat_template(True) == llm._client.model.chat_template
    with pytest.raises(ConfigError, match="one template"):
        lm.chat_template("other")


def test_long_contexts_lose_their_beginning():
    with LLM("tiny", n_ctx=32) as short:
        lm = LlamaBatchLM(short)
        text = " ".join(each["q"] for each in questions(4))
        [(logprob, _)] = lm.loglikelihood([asked("loglikelihood", text, ENDINGS[0])], disable_tqdm=True)
        tail = lm.tok_encode(text)[-(32 - len(lm.tok_encode(ENDINGS[0]))) :]
        assert logprob == pytest.approx(short.score(tail, [lm.tok_encode(ENDINGS[0])])[0].logprob, abs=1e-3)
        assert lm.generate_until([asked("generate_until", text, {"until": [], "max_gen_toks": 8})], disable_tqdm=True)[
            0
        ]
        many = [asked("generate_until", text, {"until": [], "max_gen_toks": 5000})]
        assert len(lm.generate_until(many, disable_tqdm=True)) == 1
        with pytest.raises(PromptError, match="n_ctx allows 1 to 31"):
            lm.loglikelihood([asked("loglikelihood", "Once", text)], disable_tqdm=True)


def test_thinking_is_left_out_and_its_stops_do_not_count(llm):
    prompt = "Tell me a story about a dog."
    text = llm.generate(prompt, {"temperature": 0.0, "max_tokens": 16})[0].text
    thinking, answer = text.split(" wind", 1)
    assert "strong" in thinking
    assert "the" in answer
    lm = LlamaBatchLM(llm, think_end_token=" wind")
    request = asked("generate_until", prompt, {"until": ["strong", " the"], "max_gen_toks": 16})
    assert lm.generate_until([request], disable_tqdm=True) == [answer.lstrip().split(" the")[0]]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"num_beams": 4}, "num_beams is 4"), ({"temprature": 1.0}, "temprature"), ({"top_p": 7.0}, "top_p")],
)
def test_what_cannot_be_done_is_refused_by_name(lm, kwargs, message):
    with pytest.raises(ValueError, match=message):
        lm.generate_until([asked("generate_until", "Once", {"until": [], **kwargs})], disable_tqdm=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give the model once"),
        ({"model": "tiny", "pretrained": "tiny"}, "give the model once"),
        ({"model": "tiny", "max_gen_toks": 0}, "max_gen_toks is 0"),
        ({"model": "tiny", "n_slot": 4}, "n_slot"),
        ({"model": "tiny", "enable_thinking": "yes"}, "enable_thinking"),
    ],
)
def test_wrong_arguments_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        LlamaBatchLM(**given)


def test_an_llm_that_was_given_stays_open_and_takes_no_options(llm):
    with pytest.raises(ConfigError, match="n_slots: the model is an LLM already"):
        LlamaBatchLM(llm, n_slots=4)
    LlamaBatchLM(llm).close()
    assert llm.tokenize("a")


def test_answers_are_kept_as_they_end(lm, llm, monkeypatch, tmp_path):
    tasks = {"tasks": ["local_choice", "local_text"], "use_cache": str(tmp_path / "answers"), "bootstrap_iters": 0}
    manager = TaskManager(include_path=str(write_tasks(tmp_path)))
    first = simple_evaluate(lm, task_manager=manager, **tasks)
    for name in ("score", "as_completed"):
        monkeypatch.setattr(llm, name, lambda *_, **__: pytest.fail("computed again"))
    again = simple_evaluate(lm, task_manager=manager, **tasks)
    assert again["results"] == first["results"]


def test_the_name_of_the_harness_makes_one(tmp_path):
    manager = TaskManager(include_path=str(write_tasks(tmp_path)))
    results = simple_evaluate(
        "llamabatch",
        model_args="pretrained=tiny,n_slots=4",
        batch_size=1,
        device="cpu",
        tasks=["local_choice"],
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert results["config"]["n_slots"] == 4


def command(*args):
    return CliRunner().invoke(cli, ["eval", "-m", "tiny", *map(str, args)], catch_exceptions=False)


def test_the_command_prints_a_table_and_writes_what_lm_eval_would(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write_tasks(tmp_path)
    done = command(
        "--tasks", "local_choice,local_roll", "--include-path", tmp_path, "--num_fewshot", 1, "--limit", 6,
        "--output", tmp_path / "out", "--log-samples", "--json", tmp_path / "results.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert re.search(r"local_choice +none +1 +acc +up +0\.\d{4} +0\.\d{4}", done.stdout)
    assert re.search(r"local_roll +none +1 +word_perplexity +down +\d+\.\d{4}", done.stdout)
    assert max(len(line.rstrip()) for line in lines) <= 80
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["n-samples"]["local_choice"] == {"original": 12, "effective": 6}
    written = sorted(path.name.split("_2")[0] for path in (tmp_path / "out").rglob("*.json*"))
    assert written == ["results", "samples_local_choice", "samples_local_roll"]


def test_the_command_shows_no_bars_of_others_and_nothing_of_git(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # tmp_path is in no git repository
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    write_tasks(tmp_path)
    task = json.loads((tmp_path / "local_choice.yaml").read_text())
    median = {"task": "local_median", "metric_list": [task["metric_list"][0] | {"aggregation": "median"}]}
    # lm_eval computes the error of a median by bootstrap
    (tmp_path / "local_median.yaml").write_text(json.dumps(task | median))
    tasks = "local_choice,local_text,local_roll,local_median"
    done = command("--tasks", tasks, "--include-path", tmp_path, "--limit", 3, "--json", "-")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert json.loads(done.stdout)["results"]["local_median"]["acc_stderr,none"] >= 0
    assert capfd.readouterr().err == ""
    assert lm_eval.api.task.tqdm is tqdm.tqdm
    assert not datasets.are_progress_bars_disabled()


def test_the_command_gives_json_alone(tmp_path):
    write_tasks(tmp_path)
    done = command(
        "--tasks",
        tmp_path / "local_text.yaml",
        "--apply-chat-template",
        "--seed",
        3,
        "--json",
        "-",
        "--output",
        tmp_path / "out",
        "--log-samples",
    )
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert results["config"]["fewshot_seed"] == 3
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    assert "<|im_start|>" in json.loads(samples.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--tasks", "no_such_task"), 2, "Tasks not found: no_such_task"),
        (("--tasks", "local_choice", "--log-samples"), 2, "output_path"),
        (("--tasks", "local_choice", "--seed", "a"), 2, "seed"),
        (("--tasks", "local_broken"), 3, "lm_eval ended with"),
        ((), 2, "--tasks"),
    ],
)
def test_the_command_refuses_with_a_sentence(tmp_path, args, code, message):
    write_tasks(tmp_path)
    broken = json.loads((tmp_path / "local_text.yaml").read_text())
    broken |= {"task": "local_broken", "dataset_kwargs": {"data_files": str(tmp_path / "missing.jsonl")}}
    (tmp_path / "local_broken.yaml").write_text(json.dumps(broken))
    done = command(*args, "--include-path", tmp_path)
    assert done.exit_code == code
    assert message in done.output
    assert "Traceback" not in done.output


def test_the_benchmark_asks_each_question_once_more_than_it_counts():
    llm = FakeLLM(answers="a stone")
    found = measure(LlamaBatchLM(llm), requests(4))
    assert {kind: each["requests"] for kind, each in found.items()} == {"loglikelihood": 12, "generate_until": 4}
    assert found["generate_until"]["answers"] == ["a stone"] * 4
    assert len(llm.requests) == 12 + 4 + 2
