"""python train.py [STEPS] [--keep=STEP,...]: trains with the step and the batches that were exported to this folder.

It needs only JAX and NumPy, and begins with the state of the run (state.npz), or with initial values where there is
none. Writes weights_<step>.npz after the last step and those of --keep; tools/train_elsewhere.py takes them into the
run. Prints the loss as the trainer does.
"""

import argparse
import json
import time

import jax
import numpy as np
import run
from run import FOLDER

LOGGED = 100  # steps between two lines of the log


def main(steps: int | None, kept: list[int]) -> None:
  spec = json.loads((FOLDER / 'spec.json').read_text())
  batches = Batches()
  devices = run.find_devices(spec['mesh'])
  shardings = run.shardings(spec, devices)
  state = run.initial_state(spec, shardings['state'])
  if (FOLDER / 'state.npz').exists():
    with np.load(FOLDER / 'state.npz') as arrays:
      names = {f'{part}:{name}': (part, name) for part in ('weights', 'slots') for name in state[part]}
      for key, (part, name) in names.items():
        state[part][name] = jax.device_put(arrays[key], shardings['state'][part][name])
  state['step'] = jax.device_put(np.int32(batches.begin), shardings['state']['step'])
  end = batches.begin + min(steps or batches.count, batches.count)
  put = lambda step: jax.device_put(batches[step], shardings['batch'])
  step = run.compiled(state, put(batches.begin), shardings['state'])
  begun = last = time.perf_counter()
  sums = []
  for number in range(batches.begin + 1, end + 1):
    state, metrics = step(state, put(number - 1))
    sums.append((metrics['loss'], [metrics[name] for name in spec['tokens']]))
    if number % LOGGED == 0 or number in (batches.begin + 1, end):
      loss, tokens = float(sums[-1][0]), float(sum(x for _, of in jax.device_get(sums) for x in of))
      now = time.perf_counter()
      print(f'step {number}: loss {loss:.6g}, {tokens / (now - last):.0f} tokens/s', flush=True)
      if not np.isfinite(loss):
        raise SystemExit(f'the loss must stay finite; saw {loss} at step {number}')
      sums, last = [], now
    if number in (*kept, end):
      np.savez(FOLDER / f'weights_{number:08d}.npz', **jax.device_get(state['weights']))
  print(f'{end - batches.begin} steps in {time.perf_counter() - begun:.1f} s')


class Batches:
  """Batches by step from batches.npz, which has every sentence once; see step_export/batches.py."""

  def __init__(self):
    with np.load(FOLDER / 'batches.npz') as arrays:
      self._arrays = dict(arrays)
    self.begin, (self.count, self._rows) = int(self._arrays['begin']), self._arrays['examples_in_row'].shape
    self._first = np.cumsum([0, *self._arrays['examples_in_row'].sum(1)])

  def __getitem__(self, step: int) -> dict[str, np.ndarray]:
    """Arrays of a batch, int32 [B, T] each."""
    index = step - self.begin
    counts_B = self._arrays['examples_in_row'][index]
    examples = slice(self._first[index], self._first[index + 1])
    source, target = (self._side(side, examples, counts_B) for side in ('source', 'target'))
    before = np.where(target[2] > 0, np.roll(target[0], 1, axis=1), self._arrays['begin_symbol'])
    inputs = (before * (target[1] > 0)).astype(np.int32)
    names = ('src_ids', 'src_segments', 'src_positions', 'tgt_labels', 'tgt_segments', 'tgt_positions')
    return dict(zip(names, (*source, *target), strict=True)) | {'tgt_inputs': inputs}

  def _side(self, side: str, examples: slice, counts_B: np.ndarray) -> list[np.ndarray]:
    """Ids, segments and positions of one side: the examples of a row one after the other."""
    ids, ends, numbers = (self._arrays[f'{side}_{name}'] for name in ('ids', 'ends', 'examples'))
    numbers = numbers[examples]
    begins, lengths = ends[numbers], ends[numbers + 1] - ends[numbers]
    row = np.repeat(np.arange(self._rows), counts_B)
    segment = np.arange(len(numbers)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B) + 1
    before = np.cumsum(lengths) - lengths  # tokens of the batch before the example, then of its row
    column = before - before[np.searchsorted(row, row)] if len(row) else before
    within = np.arange(lengths.sum()) - np.repeat(before, lengths)
    arrays = [np.zeros([self._rows, self._arrays[f'{side}_length']], np.int32) for _ in range(3)]
    where = np.repeat(row, lengths), np.repeat(column, lengths) + within
    for array, values in zip(arrays, (ids[np.repeat(begins, lengths) + within], np.repeat(segment, lengths), within)):
      array[where] = values
    return arrays


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description='Trains with the step and batches exported to this folder.')
  parser.add_argument('steps', type=int, nargs='?', help='as many; all that there are batches for by default')
  parser.add_argument('--keep', type=lambda s: [int(x) for x in s.split(',')], default=[], help='steps to keep')
  options = parser.parse_args()
  main(options.steps, options.keep)
