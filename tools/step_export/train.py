"""python train.py [STEPS]: trains with the step and the batches that were exported to this folder.

It needs only JAX and NumPy. It begins with the newest state_<step>.npz, so the same command resumes after a kill; where
there is none, with the state of the run (state.npz), else with initial values. As often as the run would (run.json), it
writes state_<step>.npz, weights and optimizer slots, and computes the dev loss. It keeps the newest, the best and those
of --keep, and ends early after `patience` evaluations without a gain. tools/train_elsewhere.py --take=DIR makes
checkpoints of them. Prints the loss as the trainer does.
"""

import argparse
import json
import os
import pathlib
import time

import jax
import numpy as np
import run
from run import FOLDER

LOGGED = 100  # steps between two lines of the log
PREFIXES = {'weights': '', 'slots': 'slots/'}  # of names in files of states, which are those of checkpoints
DEV_LOSSES = FOLDER / 'dev_losses.json'  # {'dev_text': its hash, 'losses': [[step, loss], ...]}


def main(steps: int | None, kept: list[int]) -> None:
  spec, of_run = (json.loads((FOLDER / name).read_text()) for name in ('spec.json', 'run.json'))
  batches, dev = Batches('batches.npz'), Batches('dev.npz')
  devices = run.find_devices(spec['mesh'])
  shardings = run.shardings(spec, devices)
  state = first_state(spec, shardings['state'], batches.begin)
  number, end = int(state['step']), batches.begin + min(steps or batches.count, batches.count)
  losses = json.loads(DEV_LOSSES.read_text())['losses'] if DEV_LOSSES.exists() else []
  losses = [loss for loss in losses if loss[0] <= number]
  put = lambda batch: jax.device_put(batch, shardings['batch'])
  step = run.compiled(state, put(batches[batches.begin]), shardings['state'])
  evaluate = jax.jit(run.load('eval').call)
  begin, begun = number, time.perf_counter()
  last, sums = begun, []
  while number < end and not out_of_patience(of_run, losses):
    state, metrics = step(state, put(batches[number]))
    number += 1
    sums.append((metrics['loss'], [metrics[name] for name in spec['tokens']]))
    if number % LOGGED == 0 or number in (begin + 1, end):
      loss, tokens = float(sums[-1][0]), float(sum(x for _, of in jax.device_get(sums) for x in of))
      now = time.perf_counter()
      print(f'step {number}: loss {loss:.6g}, {tokens / (now - last):.0f} tokens/s', flush=True)
      if not np.isfinite(objective := float(metrics['objective'])):
        raise SystemExit(f'the loss must stay finite; saw objective={objective} at step {number}')
      sums, last = [], now
    if evaluated := number % of_run['eval_every'] == 0 or number == end:
      losses.append([number, dev_loss(evaluate, state['weights'], map(put, dev))])
      print(f'step {number}: dev loss {losses[-1][1]:.4f}', flush=True)
      noted = json.dumps({'dev_text': of_run['dev_text'], 'losses': losses})
      write(DEV_LOSSES, lambda path, text=noted: path.write_text(text))  # before the state: a kill leaves no gap
      sums, last = [], time.perf_counter()
    if evaluated or number in kept or (of_run['save_every'] and number % of_run['save_every'] == 0):
      save(number, state)
      drop_old(of_run, losses, kept)
  print(f'{number - begin} steps in {time.perf_counter() - begun:.1f} s; packing')
  for path in states().values():
    pack(path)
  if losses:
    print('best dev loss {1:.4f} at step {0}'.format(*best_of(losses)))


def first_state(spec: dict, shardings: dict, begin: int) -> dict:
  """The state to go on from: of the newest file, or of the run."""
  state, saved = run.initial_state(spec, shardings), states()
  number = max(saved, default=begin)
  path = saved.get(number, FOLDER / 'state.npz')
  if path.exists():
    with np.load(path) as arrays:
      for part, prefix in PREFIXES.items():
        for name in state[part]:
          state[part][name] = jax.device_put(arrays[prefix + name], shardings[part][name])
    print(f'going on from step {number}, {path.name}', flush=True)
  state['step'] = jax.device_put(np.int32(number), shardings['step'])
  return state


def states() -> dict[int, pathlib.Path]:
  """Files of states by step, the oldest first."""
  return {int(path.stem.removeprefix('state_')): path for path in sorted(FOLDER.glob(f'state_{"[0-9]" * 8}.npz'))}


def save(number: int, state: dict) -> None:
  """Writes the state of a step, if its weights are finite; packing waits for the end, as it takes longer than steps."""
  parts = {part: jax.device_get(state[part]) for part in PREFIXES}
  if bad := [name for name, x in parts['weights'].items() if not np.isfinite(x).all()]:
    raise SystemExit(f'weights must stay finite; {bad[0]} is not at step {number}')
  arrays = {prefix + name: x for part, prefix in PREFIXES.items() for name, x in parts[part].items()}
  write(FOLDER / f'state_{number:08d}.npz', lambda path: np.savez(path, **arrays))


def pack(path: pathlib.Path) -> None:
  """Compresses a file of arrays; their values stay the same."""
  with np.load(path) as file:
    arrays = dict(file)
  write(path, lambda packed: np.savez_compressed(packed, **arrays))


def write(path: pathlib.Path, write_to) -> None:
  """Writes a file whole or not at all."""
  partial = path.with_name(f'partial{path.suffix}')
  write_to(partial)
  os.replace(partial, path)


def dev_loss(evaluate, weights: dict, batches) -> float:
  """Mean cross-entropy of a target token, in nats."""
  sums = [evaluate(weights, batch) for batch in batches]
  xent, tokens = (sum(float(of[name]) for of in sums) for name in ('xent', 'target_tokens'))
  if not np.isfinite(xent):
    raise SystemExit(f'the dev loss must stay finite; saw {xent}')
  return xent / max(tokens, 1)


def best_of(losses: list) -> list:
  """[step, loss] of the least dev loss, the earliest of equals."""
  return min(losses, key=lambda loss: loss[1], default=[None, None])


def out_of_patience(of_run: dict, losses: list) -> bool:
  """Whether `patience` evaluations have passed without a gain, with those that the run had made before."""
  best, count = of_run['best'], of_run['evaluated_after']
  for _, loss in losses:
    best, count = (loss, 0) if best is None or loss < best else (best, count + 1)
  return 0 < of_run['patience'] <= count


def drop_old(of_run: dict, losses: list, kept: list[int]) -> None:
  """Removes states that the run would not keep either: neither among the newest, nor the best, nor asked for."""
  every, saved = of_run['keep_every'], states()
  for number in list(saved)[: -of_run['keep_checkpoints']]:
    if number != best_of(losses)[0] and number not in kept and not (every and number % every == 0):
      saved[number].unlink()


class Batches:
  """Batches by step from a file that has every sentence once; see step_export/batches.py."""

  def __init__(self, name: str):
    with np.load(FOLDER / name) as arrays:
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
  parser.add_argument('steps', type=int, nargs='?', help='of this export, with those made before; default: all')
  parser.add_argument(
    '--keep', type=lambda s: [int(x) for x in s.split(',')], default=[], help='steps to save and keep'
  )
  options = parser.parse_args()
  if options.steps is not None and options.steps < 1:
    parser.error(f'steps are at least 1; saw {options.steps}')
  main(options.steps, options.keep)
