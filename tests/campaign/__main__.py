"""Campaign of faults against a small trained run: bytes flipped in its files, kills at random moments, full disks.

  python -m tests.campaign --seed=1 --flips=100 --kills=5 --full_disks=3

A flipped byte must leave the same result, or be answered by a refusal of one line; never by a stack trace, and never by
another result. A training that was killed, or had no room, must go on to the same logged values, bit for bit, and the
same weights. Prints each case as it ends, so that what was found remains if the campaign is cut off, then a table, and
each unclean case with what was said; the exit status is 1 if there is one.
"""

import argparse
import collections
import itertools
import pathlib
import random
import shutil
import sys
import tempfile
import time

from tests.campaign import flips, interruptions, world


def main() -> int:
  parser = argparse.ArgumentParser(
    'python -m tests.campaign', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--seed', type=int, default=1, help='chooses bytes, bits and moments')
  parser.add_argument('--flips', type=int, default=100, help='bytes to flip, spread over all kinds of files')
  parser.add_argument('--kills', type=int, default=5, help='times that a training is killed')
  parser.add_argument('--full_disks', type=int, default=3, help='sizes of a file system that is too small')
  args = parser.parse_args()
  root = pathlib.Path(tempfile.mkdtemp(prefix='campaign.'))
  begun = time.monotonic()
  try:
    own = world.make(root)
    print(f'seed {args.seed}: a run of {world.STEPS} steps, {time.monotonic() - begun:.0f} s', file=sys.stderr)
    rng = random.Random(args.seed)
    results = []
    cases = itertools.chain(
      flips.campaign(own, rng, args.flips),
      interruptions.kills(own, rng, args.kills),
      interruptions.kills_at_files(own) if args.kills else (),
      interruptions.full_disks(own, rng, args.full_disks),
    )
    for result in cases:
      results.append(result)
      print(f'{time.monotonic() - begun:5.0f} s  {result.outcome}: {result.kind}, {result.case}', flush=True)
  finally:
    shutil.rmtree(root, ignore_errors=True)
  return report(results, time.monotonic() - begun)


def report(results: list[world.Result], seconds: float) -> int:
  """Prints the table; returns the exit status."""
  counts = collections.defaultdict(collections.Counter)
  for result in results:
    counts[result.kind][result.outcome] += 1
  columns = ('tried', 'same', 'refused', 'unclean')
  print(f'{"":28}' + ''.join(f'{column:>9}' for column in columns))
  for kind, by_outcome in [*sorted(counts.items()), ('all', sum(counts.values(), collections.Counter()))]:
    tried = sum(by_outcome.values())
    clean = by_outcome['same'], by_outcome['refused']
    print(f'{kind:28}' + ''.join(f'{n:9}' for n in (tried, *clean, tried - sum(clean))))
  unclean = [result for result in results if result.outcome not in ('same', 'refused')]
  for result in unclean:
    print(f'\n{result.outcome}: {result.kind}, {result.case}\n{result.said}')
  print(f'{seconds:.0f} s', file=sys.stderr)
  return 1 if unclean else 0


if __name__ == '__main__':
  sys.exit(main())
