"""The alphabet of axis letters, in the code and on the page."""

import pathlib
import re

import pytest

from lingvo_moe.core import axes

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUFFIX = re.compile(r'\b[a-z][a-z0-9_]*_([A-Z][A-Z0-9]*)\b')


def test_every_letter_of_a_name_is_in_the_alphabet():
  files = [path for folder in ('lingvo_moe', 'params', 'tools') for path in (ROOT / folder).rglob('*.py')]
  assert len(files) > 200
  used = {
    (match[0], letter) for path in files for match in SUFFIX.finditer(path.read_text('utf-8')) for letter in match[1]
  }
  assert {name for name, letter in used if not letter.isdigit() and letter not in axes.AXES} == set()


def test_the_glossary_has_every_letter():
  text = (ROOT / 'docs' / 'glossary.md').read_text('utf-8')
  cells = re.findall(r'\| `(\w)` \|', text[text.index('## Letters of tensor axes') :])
  assert sorted(cells) == sorted(axes.AXES)


def test_a_letter_outside_of_the_alphabet_is_named():
  with pytest.raises(ValueError, match="axis letter 'y' of 'ByM' is not in the alphabet"):
    axes.check('ByM')
