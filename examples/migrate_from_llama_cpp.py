"""Code for llama_cpp.Llama, ported: the calls change, the dictionaries with the answers stay."""

from llamabatch import LLM, SamplingParams

# before:
#   llama = llama_cpp.Llama("model.gguf", n_ctx=512)
#   answers = [llama.create_chat_completion([{"role": "user", "content": q}], max_tokens=16, temperature=0)
#              for q in questions]
#   for answer in answers: print(answer["choices"][0]["message"]["content"])

questions = ["What is the capital of France?", "What is the capital of Italy?"]

with LLM("tiny", n_ctx=512) as llm:
    # all questions at once instead of one after another; repeat_penalty and other old names are understood
    conversations = [[{"role": "user", "content": q}] for q in questions]
    outputs = llm.chat(conversations, {"max_tokens": 16, "temperature": 0, "repeat_penalty": 1.0})
    for answer in (output.to_openai(chat=True) for output in outputs):
        print(answer["choices"][0]["message"]["content"], answer["usage"]["total_tokens"])

    # create_completion(prompt, stream=True)
    for piece in llm.stream("Once upon a time", SamplingParams(max_tokens=8, temperature=0)):
        print(piece.to_openai()["choices"][0]["text"], end="")
    print()
