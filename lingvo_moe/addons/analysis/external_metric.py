"""External metrics: a command reads source, translation and reference, with tabs between, and prints a score a line."""

import subprocess
from collections.abc import Sequence

import numpy as np

from lingvo_moe.addons.analysis.significance import Difference, interval
from lingvo_moe.core.errors import UserError


def scores(command: str, sources: Sequence[str], translations: Sequence[str], references: Sequence[str]) -> np.ndarray:
  """Score of each translation, by a command of the shell; UserError where it fails or prints anything else."""
  rows = zip(sources, translations, references, strict=True)
  lines = ''.join('\t'.join(text.replace('\t', ' ') for text in row) + '\n' for row in rows)
  done = subprocess.run(command, shell=True, input=lines.encode(), capture_output=True)
  if done.returncode:
    *_, last = ['', *done.stderr.decode(errors='replace').strip().splitlines()]
    raise UserError(f'--metric_command={command!r} ended with status {done.returncode}: {last or "it says nothing"}')
  printed = done.stdout.decode(errors='replace').split('\n')[:-1]
  try:
    values = np.array([float(line) for line in printed])
  except ValueError as e:
    raise UserError(f'--metric_command={command!r} must print a number a line; {e}') from None
  if len(values) != len(sources) or not np.isfinite(values).all():
    raise UserError(
      f'--metric_command={command!r} must print a finite number for each line; saw {len(values)} for {len(sources)}'
    )
  return values


def difference(baseline: np.ndarray, system: np.ndarray, samples: int, seed: int) -> Difference:
  """Difference of the mean scores of two systems on the same lines, by paired bootstrap; p is two-sided."""
  rng, gains = np.random.default_rng(seed), system - baseline
  means = np.array([gains[rng.integers(len(gains), size=len(gains))].mean() for _ in range(samples)])
  as_far = int(np.sum(np.abs(means - means.mean()) >= abs(gains.mean())))
  return Difference(baseline.mean(), system.mean(), *interval(means), (as_far + 1) / (samples + 1))
