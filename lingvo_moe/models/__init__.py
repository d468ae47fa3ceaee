"""Models: what is computed from a batch of ids, with its loss; names of the arrays of a batch, counts of weights.

Imports layers and what is below them; no file of text, no task.
"""
