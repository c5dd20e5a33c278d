"""One loaded model behind a server: its states, and the way of a request to the engine and back."""
