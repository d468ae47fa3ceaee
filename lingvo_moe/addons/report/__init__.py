"""Report of some runs as one HTML file that opens offline; see lingvo_moe/cli/commands/report.py.

Nothing here needs TensorFlow. reading.py reads what runs have left, series.py thins it out, markup.py and page.py write
HTML, svg.py draws, and figures.py joins a plot with the table behind it; every other file is a section of the report.
"""
