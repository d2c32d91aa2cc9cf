"""Turns raw text into shuffled shards of tokens (the Optimus paper, section 4), and loads batches."""
