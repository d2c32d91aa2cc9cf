"""From raw text to batches of tokens, in the paper's three steps (Optimus, section 4 "Data preprocessing")."""
