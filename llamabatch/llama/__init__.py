"""The only room that touches llama.cpp: library, model, context, batch, model_runner. Imports `sampling` and what
stands below it.
"""
