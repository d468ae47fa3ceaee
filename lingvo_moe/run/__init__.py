"""Parts of the jobs around a run's log directory.

directory      rundir.py; what it keeps of where a run began: corpus_record.py, environment.py
training       warm_start.py, the first state; training.py, the steps; process_group.py, the processes; what follows a
               step: evaluation.py, signals.py, advice.py
logs           reporting.py, with the dev loss, TensorBoard's event file and which experts are used
checkpoints    checkpoint.py, one of them; checkpoints.py, those of a run; averaging.py
decoding       results.py, files of results and texts so far; loaded.py, from Python

Imports the protocol of tasks (tasks/task.py), no task by name, and runtimes; the jobs (trainer, decoder, translate)
import it.
"""
