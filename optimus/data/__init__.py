"""From raw text to batches of tokens, in the paper's three steps (Optimus, section 4 "Data preprocessing").

`preparation.py` tokenises documents into one stream, shuffles all training instances with one keyed permutation and gathers
them into shards; `shards.py` opens the folder it leaves; `loader.py` hands each rank its part of every global batch.
"""
