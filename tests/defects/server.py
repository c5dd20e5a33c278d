"""Defects of the server."""

from __future__ import annotations

from tests.defects import Defect

DEFECTS = (
    Defect(
        what="a file can be read after the time at which it was to expire",
        file="llamabatch/server/batches/store.py",
        old="if record is None or self._is_over(record):",
        new="if record is None:",
        tests=("tests/unit/server/test_batches.py", "tests/unit/server/test_batch_routes.py"),
    ),
    Defect(
        what="/v1/score gives its scores by relevance, and not in the order of the documents",
        file="llamabatch/server/vllm/rerank.py",
        old="in_order = sorted(results, key=lambda each: each.index)",
        new="in_order = results",
        tests=("tests/unit/server/test_pooling_endpoints.py", "tests/model/test_server_endpoints.py"),
    ),
    Defect(
        what="a request with the header X-Request-Timeout outlives the shorter deadline_s of its body",
        file="llamabatch/server/request/generation.py",
        old="deadline = rules.timeout_s if params.deadline_s is None else min(params.deadline_s, rules.timeout_s)",
        new="deadline = rules.timeout_s",
        tests=("tests/unit/server/test_bodies.py", "tests/unit/server/test_chat_body.py"),
    ),
    Defect(
        what="a body without a content-length may be as large as all bodies together",
        file="llamabatch/server/http/body_limits.py",
        old="most -= size\n                if is_kept:",
        new="if is_kept:",
        tests=("tests/unit/server/test_limits.py", "tests/unit/server/test_secured_application.py"),
    ),
    Defect(
        what="in /v1/messages, the text before a tool's result stands in the prompt once more behind it",
        file="llamabatch/server/anthropic/messages_body.py",
        old='"content": content_of(parts)}\n                parts = []',
        new='"content": content_of(parts)}',
        tests=("tests/unit/server/test_messages.py",),
    ),
    Defect(
        what="a key keeps its old limits after the file of keys was changed",
        file="llamabatch/server/http/keys.py",
        old="use.key = key\n            found[digest] = use",
        new="found[digest] = use",
        tests=("tests/unit/server/test_keys.py", "tests/unit/server/test_secured_application.py"),
    ),
    Defect(
        what="requests can load files beside the folder of adapters, from one whose name begins like its own",
        file="llamabatch/server/serving/adapters.py",
        old="if folder not in file.parents:",
        new="if not str(file).startswith(str(folder)):",
        tests=("tests/unit/server/test_adapter_endpoints.py", "tests/model/test_server_native.py"),
    ),
    Defect(
        what="with return_tokens_as_token_ids, text_offset counts the letters of token_id:17 and not those of the text",
        file="llamabatch/server/openai/completion_response.py",
        old="self._places.add(self._piece(token_id))",
        new='self._places.add(b"token_id:%d" % token_id if self._as_ids else self._piece(token_id))',
        tests=("tests/unit/server/test_application.py", "tests/unit/server/test_large_answers.py"),
    ),
    Defect(
        what="a slow reader of a stream with logprobs loses pieces of the text",
        file="llamabatch/server/response/event_stream.py",
        old=(
            "if last:\n                                await send_part(last)\n"
            "                            last = await self._serving.on_thread(chunks.feed"
        ),
        new="last = await self._serving.on_thread(chunks.feed",
        tests=(
            "tests/unit/server/test_large_answers.py",
            "tests/unit/server/test_application.py",
            "tests/model/test_server_slow_readers.py",
        ),
    ),
    Defect(
        what="a request whose caller leaves while it is being submitted runs to its end for nobody",
        file="llamabatch/server/serving/serving.py",
        old="dispatcher.remove(ids)\n            client.abort(ids)",
        new="dispatcher.remove(ids)",
        tests=(
            "tests/unit/server/test_request_checks.py",
            "tests/unit/server/test_dispatcher.py",
            "tests/unit/server/test_application.py",
            "tests/model/test_server_disconnects.py",
        ),
    ),
)
