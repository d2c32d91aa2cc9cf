"""Turns raw text into batches of tokens, in the paper's three steps (Optimus, section 4 "Data preprocessing")."""
