"""The parses of llama.cpp, which llama-server answers with: its own code for texts of ours, recorded in parses.json."""
