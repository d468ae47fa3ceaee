"""Benchmarks in processes of their own: started in turn, their results read from a file of JSON lines."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lingvo_moe.core.errors import UserError

T = TypeVar('T')


def alternate(
  runs: Mapping[str, Callable[[], T]], rounds: int, progress: Callable[[str], object] = lambda _: None
) -> dict[str, list[T]]:
  """Calls each function once in every round, in turn; returns the results of each, by name."""
  results = {name: [] for name in runs}
  for number in range(rounds):
    for name, run in runs.items():
      progress(f'round {number + 1} of {rounds}: {name}')
      results[name].append(run())
  return results


def records(command: Sequence[str], name: str, **options: Any) -> list[dict[str, Any]]:
  """Runs a command, which writes lines of JSON to the file of its flag --json; options are those of subprocess.run."""
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'results')
    run([*command, f'--json={path}'], f'{name}: its benchmark', **options)
    with open(path, encoding='utf-8') as f:
      return [json.loads(line) for line in f]


def of_engine(module: str, engine: str, folder: str, job: Any) -> list[dict[str, Any]]:
  """Results of python -m MODULE ENGINE FOLDER, which imports no TensorFlow; the job is its input, as JSON."""
  tools = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, [tools, os.environ.get('PYTHONPATH')]))}
  command = [sys.executable, '-P', '-m', module, engine, folder]
  return records(command, engine, input=json.dumps(dataclasses.asdict(job)), env=env)


def run(command: Sequence[str], what: str, **options: Any) -> None:
  """Runs a command, with options of subprocess.run; UserError with the last line that it prints where it fails."""
  done = subprocess.run(command, capture_output=True, text=True, **options)
  if done.returncode:
    raise UserError(f'{what} ended with exit status {done.returncode}: {last_line(done.stderr)}')


def last_line(text: str) -> str:
  """Last line of what a process printed."""
  return next(iter(text.strip().splitlines()[::-1]), 'it says nothing')
