"""Parts of the jobs around a run's log directory.

rundir.py      the directory                       training.py, hooks.py  the training loop's steps and what follows each
checkpoint.py  saving and restoring                reporting.py           the log and the dev loss
inference.py   loading a run for decoding          held_out.py            files of results on held-out text
warm_start.py  the first state of a training run   event_file.py          TensorBoard files

Imports the protocol of tasks (tasks/task.py), no task by name, and runtimes; the jobs (trainer, decoder, translate)
import it.
"""
