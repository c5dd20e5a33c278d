"""A model behind Ray Serve, asked by the plain openai client. `pip install "llamabatch[ray,server]" openai`"""

import asyncio
import socket
import sys

import ray
from openai import AsyncOpenAI
from ray import serve

from llamabatch.integrations.ray import serve_app

model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
with socket.socket() as free:  # or a port of your own
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ray.init(num_cpus=2, object_store_memory=200_000_000, include_dashboard=False)  # on a cluster: ray.init()
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(serve_app(model, num_replicas=2, n_slots=4, n_threads=1))


async def ask(questions):
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        asked = [
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": each}], max_tokens=24)
            for each in questions
        ]
        for answer in await asyncio.gather(*asked):
            print(answer.choices[0].message.content)
        stream = await client.completions.create(model=model, prompt="Once upon a time", max_tokens=32, stream=True)
        async for chunk in stream:
            print(chunk.choices[0].text, end="", flush=True)
        print()


try:
    asyncio.run(ask([f"What is {n} plus 5?" for n in range(8)]))
finally:
    serve.shutdown()
    ray.shutdown()
