"""Trainings that are killed at random moments, or run out of disk; each must reach what an undisturbed one did."""

import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from lingvo_moe.storage import json_files
from tests.campaign import world as world_lib
from tests.campaign.world import Result

_OF_TIME = ('time', 'seconds_so_far', 'tokens_per_second', 'input_wait_share')


def kills(world: world_lib.World, rng: random.Random, count: int) -> Iterator[Result]:
  """Kills trainings at moments of their course, until `count` kills were made; a result for each kill."""
  made, longest = 0, world.seconds
  while made < count:
    place = world.root / 'killed'
    moments = []
    shutil.copytree(world.root / 'kept' / 'corpus', place / 'corpus')
    command = world_lib.trainer(place / 'log', place / 'corpus')
    while True:
      moment = rng.uniform(0, longest) if made < count else None
      begun = time.monotonic()
      process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
      try:
        _, said = process.communicate(timeout=moment)
        longest = min(longest, time.monotonic() - begun)
        break
      except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        made += 1
        moments.append(f'{moment:.1f}')
    result = _compared(world, place, 'killed', f'after {", ".join(moments)} s', process.returncode, said)
    yield from [result] * len(moments)
    shutil.rmtree(place)


_AT_FILE = """
import os, signal, sys
name = sys.argv.pop(1)
opened = lambda event, arguments: event == 'open' and os.path.basename(str(arguments[0])) == name
sys.addaudithook(lambda event, arguments: opened(event, arguments) and os.kill(os.getpid(), signal.SIGKILL))
from lingvo_moe import trainer
trainer.main()
"""


def kills_at_files(world: world_lib.World) -> Iterator[Result]:
  """Kills a training where it begins to write a file, the line of the log before it written; then it goes on."""
  for name in ('corpus.json.partial', 'dev_loss.json.partial', 'finished.json.partial'):
    place = world.root / 'killed'
    shutil.copytree(world.root / 'kept' / 'corpus', place / 'corpus')
    command = world_lib.trainer(place / 'log', place / 'corpus')
    flags = [flag for flag in command if flag.startswith('--')]
    first = subprocess.run([sys.executable, '-c', _AT_FILE, name, *flags], capture_output=True, text=True)
    again = subprocess.run(command, capture_output=True, text=True)
    if first.returncode != -signal.SIGKILL:
      yield Result('killed at a file', name, f'exit status {first.returncode}', first.stderr[-2000:])
    else:
      yield _compared(world, place, 'killed at a file', name, again.returncode, again.stderr)
    shutil.rmtree(place)


def full_disks(world: world_lib.World, rng: random.Random, count: int) -> Iterator[Result]:
  """Trains on a file system that is too small, then, with room, goes on."""
  if not count:
    return
  place = world.root / 'disk'
  kept = sum(path.stat().st_size for path in (world.root / 'kept').rglob('*') if path.is_file())
  for _ in range(count):
    size = rng.randrange(64 << 10, kept)
    place.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', place], capture_output=True).returncode:
      print('full disks: skipped, as no file system may be mounted here', file=sys.stderr)
      place.rmdir()
      return
    try:
      corpus = world.root / 'kept' / 'corpus'
      command = world_lib.trainer(place / 'log', corpus)
      first = subprocess.run(command, capture_output=True, text=True)
      subprocess.run(['mount', '-o', 'remount,size=1g', place], check=True)
      again = subprocess.run(command, capture_output=True, text=True)
      case = f'{size} bytes'
      if first.returncode and not _is_refusal(first.stderr):
        yield Result('full disk', case, 'no line of its own', first.stderr[-2000:])
      else:
        yield _compared(world, place, 'full disk', case, again.returncode, again.stderr)
    finally:
      subprocess.run(['umount', place], check=True)
      time.sleep(0.1)
      place.rmdir()


def _is_refusal(stderr: str) -> bool:
  last = stderr.rstrip().splitlines()[-1:]
  return 'Traceback' not in stderr and bool(last) and last[0].startswith('error: ')


def _compared(world, place: pathlib.Path, kind: str, case: str, status: int, said: str) -> Result:
  """Compares values that were logged, and the last weights, with those of the undisturbed run; and what was left."""
  if status:
    return Result(kind, case, f'exit status {status}', said[-2000:])
  kept = world.root / 'kept' / 'log'
  if _logged(place / 'log') != _logged(kept):
    return Result(kind, case, 'OTHER VALUES', f'{_logged(place / "log")}\n{_logged(kept)}')
  if not _same_weights(place / 'log', kept):
    return Result(kind, case, 'OTHER WEIGHTS')
  left = [path for path in (place / 'log').rglob('*') if 'partial' in path.name or '.tmp-' in path.name]
  return Result(kind, case, f'left behind: {left}' if left else 'same')


def _logged(logdir: pathlib.Path) -> list[dict]:
  lines = [found for _, found in json_files.lines(str(logdir / 'train.jsonl'))]
  return [{name: value for name, value in line.items() if name not in _OF_TIME} for line in lines]


def _same_weights(a: pathlib.Path, b: pathlib.Path) -> bool:
  import tensorflow as tf  # after lingvo_moe, which makes its import quiet

  prefixes = [str(log / 'checkpoints' / f'step_{world_lib.STEPS:08d}' / 'state') for log in (a, b)]
  readers = [tf.train.load_checkpoint(prefix) for prefix in prefixes]
  names = readers[0].get_variable_to_shape_map()
  return all((readers[0].get_tensor(name) == readers[1].get_tensor(name)).all() for name in names)
