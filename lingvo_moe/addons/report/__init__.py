"""Report of some runs as one HTML file that opens offline; see lingvo_moe/cli/commands/report.py.

Nothing here needs TensorFlow. reading.py reads what runs have left, series.py thins it out, verdict.py judges its
numbers, escaped_html.py and page.py write HTML, svg.py draws, figures.py joins a plot with the table behind it, and
report.js shows values under the pointer; every other file is a section of the report.
"""
