"""A list of questions in, a list of answers out."""

from llamabatch import LLM, SamplingParams

questions = ["What is the capital of France?", "What is 7 plus 5?", "Tell me a short story about a fox."]

with LLM("tiny") as llm:  # or the path of a .gguf file
    conversations = [[{"role": "user", "content": question}] for question in questions]
    for output in llm.chat(conversations, SamplingParams(max_tokens=96, temperature=0)):
        print(output.text, f"({output.finish_reason}, first token after {output.timings.ttft_s:.3f} s)")
