"""What a run leaves and finds: its log directory, checkpoints, logs, held-out scores, and weights to begin with.

Imports tasks and runtimes; the jobs (trainer, decoder, translate) import it.
"""
