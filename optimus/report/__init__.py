"""Shows runs as a page: curves, time and memory, expert loads, timelines and comparisons.

uPlot (MIT, version 1.6.32, with its licence in `static/uplot/`) draws the charts.
"""
