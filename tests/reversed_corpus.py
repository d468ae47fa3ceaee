"""Small corpus 'xx-en' for tests of jobs: a source line is its target line, letters reversed."""

import pathlib
import random

_WORDS = ['one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten']


def write(folder: pathlib.Path, *, held_out: int) -> pathlib.Path:
  """Writes 300 training lines, and as many of dev and of test as `held_out`; returns the folder of the corpus."""
  pair = folder / 'xx-en'
  pair.mkdir()
  rng = random.Random(0)
  for split, lines in (('train', 300), ('dev', held_out), ('test', held_out)):
    target = [' '.join(rng.choices(_WORDS, k=rng.randint(1, 7))) for _ in range(lines)]
    (pair / f'{split}.en').write_text('\n'.join(target) + '\n')
    (pair / f'{split}.xx').write_text('\n'.join(line[::-1] for line in target) + '\n')
  return folder
