"""The only room that touches llama.cpp: everything native is called from here."""
