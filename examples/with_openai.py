"""The plain openai client with `llamabatch serve`: an answer, a stream, and many requests at once."""

import asyncio
import socket
import subprocess
import sys

from openai import AsyncOpenAI, OpenAI

with socket.socket() as free:  # or a port of your own: llamabatch serve -m model.gguf --port 8080
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen([sys.executable, "-m", "llamabatch", "serve", "-m", "tiny", "--port", str(port)])
# the client retries until the model is loaded, as the server asks (503, Retry-After)
where = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "none", "max_retries": 20}


def messages(text):
    return [{"role": "user", "content": text}]


async def many(questions):
    async with AsyncOpenAI(**where) as client:
        asked = (client.chat.completions.create(model="tiny", messages=messages(q), max_tokens=32) for q in questions)
        return await asyncio.gather(*asked)  # these requests share each pass over the weights


try:
    with OpenAI(**where) as client:
        answer = client.chat.completions.create(model="tiny", messages=messages("What is 7 plus 5?"), temperature=0)
        print(answer.choices[0].message.content, answer.usage.completion_tokens)
        # fields that OpenAI's API does not have go into extra_body
        options = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
        for chunk in client.chat.completions.create(
            model="tiny", messages=messages("Tell me a story."), max_tokens=64, stream=True, extra_body=options
        ):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
    for answer in asyncio.run(many([f"What is {n} plus 5?" for n in range(8)])):
        print(answer.choices[0].message.content)
finally:
    server.terminate()
    server.wait()
