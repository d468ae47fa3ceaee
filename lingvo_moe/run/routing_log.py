"""Log of which experts are used: routing.jsonl over training, and dev_routing.json of the last evaluation.

routing.jsonl      {"step", "steps", "choices": {layer: [E]}} for each fiftieth of a run: the choices with a slot of
                   every expert, summed over the `steps` steps up to `step`. A resumed run has the steps since.
dev_routing.json   {"step", "subsets": [P], "choices": {layer: [P, E]}}: the same of each part of the dev text
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_moe.core import files, json_files, log_directory

_LINES = 50  # of a whole run


class RoutingLog:
  """Sums of the choices of every expert, and the file they are written to.

  Lines of the file after `first_step` are dropped, since their steps are made again.
  """

  def __init__(self, logdir: str, max_steps: int, first_step: int):
    self._path = os.path.join(logdir, log_directory.ROUTING_LOG)
    self._max_steps = max_steps
    self._every = max(1, -(-max_steps // _LINES))
    self._steps = 0
    self._choices: dict[str, np.ndarray] = {}
    json_files.keep_lines_up_to(self._path, first_step)

  def step(self, step: int, loads: Mapping[str, np.ndarray]) -> None:
    """Adds the loads of a step, [E] by layer, and writes a line where one is due."""
    if not loads:
      return
    self._steps += 1
    for layer, load_E in loads.items():
      self._choices[layer] = self._choices.get(layer, 0.0) + np.asarray(load_E, np.float64)
    if step % self._every == 0 or step == self._max_steps:
      line = {'step': step, 'steps': self._steps, 'choices': _as_integers(self._choices)}
      with files.append(self._path) as f:
        f.write(json_files.dump(line))
      self._steps, self._choices = 0, {}


def write_dev(logdir: str, step: int, subsets: Sequence[str], choices: Mapping[str, np.ndarray]) -> None:
  """Writes dev_routing.json, if there are experts, in place of that of an earlier step; choices are [P, E] by layer."""
  if not choices:
    return
  line = {'step': step, 'subsets': list(subsets), 'choices': _as_integers(choices)}
  files.write(os.path.join(logdir, log_directory.DEV_ROUTING), json_files.dump(line))


def _as_integers(choices: Mapping[str, np.ndarray]) -> dict[str, list]:
  return {layer: np.rint(counts).astype(np.int64).tolist() for layer, counts in choices.items()}
