"""A run as a page: curves, time and memory, load of experts, timelines, comparison of runs; from the files of runs alone.

Start with `folder.py` (what a run folder says), then `page.py` (what the page holds). `static/` has the page itself; its
charts are drawn by uPlot (MIT, version 1.6.32, with its licence beside it).
"""
