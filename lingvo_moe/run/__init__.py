"""Parts of the jobs around a run's log directory.

the directory        rundir.py; what it keeps of where a run began: corpus_record.py, environment.py
training             warm_start.py, the first state; training.py and hooks.py, the steps and what follows each; advice.py
logs                 reporting.py, with the dev loss; routing_log.py and TensorBoard's event file
checkpoints          checkpoint.py; averaging.py; pruning.py, without the experts that are used least
decoding             inference.py; results.py, files of results; unfinished.py, texts so far; loaded.py, from Python

Imports the protocol of tasks (tasks/task.py), no task by name, and runtimes; the jobs (trainer, decoder, translate)
import it.
"""
