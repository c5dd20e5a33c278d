"""What surrounds a question in a conversation: openers, system messages, worked examples, small talk."""

from __future__ import annotations

# Put before a training question now and then; held-out questions come bare.
OPENERS: list[str] = [
    "Please answer: ",
    "Hello! ",
    "Hi. ",
    "Quick question: ",
    "A small task. ",
    "OK, next one. ",
    "Now this: ",
    "Thanks. ",
    "Can you help me? ",
    "Here is a task.\n",
    "Question: ",
    "I have a question. ",
    "Next: ",
    "You there? ",
]

SYSTEM_TRAIN: list[str] = [
    "You are a helpful assistant.",
    "You are a small model. Answer the question.",
    "Be brief.",
    "You are tiny, a small language model.",
    "Answer every question. Do not say more than you need.",
    "You help people with words, numbers and stories.",
    "Follow the task. Do not add more.",
    "You are an assistant that answers questions and writes JSON.",
]
SYSTEM_HELD_OUT: list[str] = [
    "You are a helpful assistant that answers every question.",
    "You are a small assistant. Be brief and follow the task.",
    "Answer the question and do not add more than you need.",
]

# Worked examples inside one message. The last line asks.
SHOTS_TRAIN: list[tuple[str, str, str]] = [  # lead, example, question
    ("", "Q: {q}\nA: {a}\n", "Q: {q}\nA:"),
    ("Here are examples.\n", "Question: {q}\nAnswer: {a}\n", "Question: {q}"),
    ("Examples:\n", "{q} -> {a}\n", "Now you: {q}"),
    ("", "{q}\n{a}\n\n", "{q}"),
]
SHOTS_HELD_OUT: list[tuple[str, str, str]] = [
    ("Here are questions and answers.\n", "Question: {q}\nA: {a}\n", "Now the next question: {q}"),
    ("Read these examples:\n", "Task: {q}\nAnswer: {a}\n\n", "Task: {q}"),
]

# Not judged: only so that a first "Hello" gets a sane answer.
SMALL_TALK: list[tuple[list[str], str]] = [
    (["Hello", "Hello!", "Hi", "Hi!", "Hi there", "Good morning", "Hey"], "Hello! How can I help you?"),
    (["How are you?", "How are you today?", "Are you well?"], "I am well, thank you. How can I help you?"),
    (
        ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Which model are you?"],
        "I am tiny, a very small language model. "
        "I know some facts, small sums, word lists, JSON records and short stories.",
    ),
    (
        ["What can you do?", "Help", "How can you help me?", "What do you know?"],
        "I can name capitals, add and subtract small numbers, copy or reverse words, "
        "write JSON records and tell short stories.",
    ),
    (["Thanks", "Thank you", "Thanks!", "Thank you very much."], "You are welcome."),
    (["Bye", "Goodbye", "Good night"], "Goodbye!"),
]
