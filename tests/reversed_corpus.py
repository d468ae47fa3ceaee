"""Small corpora for tests of jobs: a source line is its target line, letters reversed."""

import pathlib
import random
from collections.abc import Sequence

_WORDS = ['one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten']


def write(folder: pathlib.Path, *, held_out: int) -> pathlib.Path:
  """Writes 300 training lines of xx-en, and as many of dev and of test as `held_out`; returns the corpus's folder."""
  rng = random.Random(0)
  for split, lines in (('train', 300), ('dev', held_out), ('test', held_out)):
    write_lines(folder / 'xx-en', split, draw(rng, lines))
  return folder


def draw(rng: random.Random, lines: int, words: Sequence[str] = _WORDS) -> list[str]:
  """Target lines of one to seven words."""
  return [' '.join(rng.choices(words, k=rng.randint(1, 7))) for _ in range(lines)]


def write_lines(pair: pathlib.Path, split: str, targets: Sequence[str]) -> None:
  """Writes both sides of a split into the folder of a pair, such as 'xx-en'."""
  pair.mkdir(parents=True, exist_ok=True)
  source, target = pair.name.split('-')
  (pair / f'{split}.{target}').write_text(''.join(line + '\n' for line in targets))
  (pair / f'{split}.{source}').write_text(''.join(line[::-1] + '\n' for line in targets))
