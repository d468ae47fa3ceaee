"""Bytes flipped at random in every kind of file of a run, of its token cache and of its corpus."""

import fnmatch
import pathlib
import random
from collections.abc import Iterator

from tests.campaign import world as world_lib
from tests.campaign.world import Result

# The commands that read a kind of file, which is a pattern of paths; the first pattern that matches counts.
_READERS = {
  'log/vocab/*.model': ('translate', 'resume'),
  'log/vocab/*.json': ('resume',),
  'log/config.json': ('translate', 'resume', 'report', 'decode'),
  'log/checkpoints/*/dev_loss.json': ('translate', 'resume'),
  'log/checkpoints/*/state.*': ('translate', 'resume'),
  'log/cache/*/00000.tokens': ('resume',),
  'log/cache/*/00000.offsets': ('resume',),
  'log/cache/*/00000.json': ('resume',),
  'log/cache/*/meta.json': ('resume',),
  'log/cache/*.json': ('resume',),
  'log/train.jsonl': ('resume', 'report', 'translate'),
  'log/routing.jsonl': ('report',),
  'log/dev_routing.json': ('report',),
  'log/environment.jsonl': ('resume', 'report'),
  'log/finished.json': ('report',),
  'log/corpus.json': ('resume',),
  'log/decode/*/scores.json': ('decode', 'report', 'translations'),
  'log/decode/*/*.hyp': ('translations', 'decode'),
  'log/decode/*/*.src': ('decode',),
  'log/decode/*/*.ref': ('decode',),
  'corpus/*': ('resume',),
}
_NOT_READ = ('log/vocab/*.vocab', '*.tfevents.*', '*/.lock', 'corpus/*/test.*')


def campaign(world: world_lib.World, rng: random.Random, count: int) -> Iterator[Result]:
  """`count` flips, the kinds of files in turn; of checkpoints, those that are used."""
  by_kind = {kind: files for kind in _READERS if (files := [p for p in _files(world) if _kind(p) == kind])}
  for number in range(count):
    kind = list(by_kind)[number % len(by_kind)]
    yield _flip(world, rng, kind, rng.choice(by_kind[kind]))


def _files(world: world_lib.World) -> list[pathlib.Path]:
  kept = world.root / 'kept'
  found = [path.relative_to(kept) for path in sorted(kept.rglob('*')) if path.is_file() and path.stat().st_size]
  used = [f'step_{step:08d}' for step in (3, world_lib.STEPS)]
  return [p for p in found if _kind(p) and ('checkpoints' not in p.parts or p.parts[2] in used)]


def _kind(path: pathlib.Path) -> str | None:
  if any(fnmatch.fnmatch(str(path), pattern) for pattern in _NOT_READ):
    return None
  kind = next((pattern for pattern in _READERS if fnmatch.fnmatch(str(path), pattern)), None)
  if kind is None:
    raise SystemExit(f'{path} is a kind of file that this campaign does not know: add it to _READERS')
  return kind


def _flip(world: world_lib.World, rng: random.Random, kind: str, path: pathlib.Path) -> Result:
  command = rng.choice(_READERS[kind])
  with world.copy() as place:
    data = bytearray((place / path).read_bytes())
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    (place / path).write_bytes(data)
    answer, found = world_lib.run(command, place)
  case = f'bit {bit} of byte {at} of {path}, {command}'
  if answer == 'result':
    same = found == world.expected[command]
    return Result(kind, case, 'same' if same else 'ANOTHER RESULT', f'{found}'[:600])
  return Result(kind, case, answer, found)
