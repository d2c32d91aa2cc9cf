"""Shows runs as a page: curves, time and memory, expert loads, timelines and comparisons. The run folders are the only
source of the page.

Start with `folder.py` (reads a run folder), then `page.py` (builds the data of the page). `static/` has the page
itself. uPlot (MIT, version 1.6.32, with its licence in `static/uplot/`) draws the charts.
"""
