"""The data of a request: SamplingParams, Request, Sequence, outputs, logprobs, detokenizer. Imports `utils`."""
