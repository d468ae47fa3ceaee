"""Token cache: any damaged block is made again, and entries of other vocabularies stay."""

import pathlib
import types

import numpy as np
import pytest

from lingvo_moe.inputs import token_cache
from lingvo_moe.storage import blocks

LINES = ['', '', *('x' * (i % 5) for i in range(60)), '', '']  # its ids are the numbers of its letters


def entry_of(path, fingerprint='letters'):
  """Entry whose lines of n letters are the ids 1 to n."""

  def tokenise(parts, progress):
    for part in parts:
      lines = pathlib.Path(part.path).read_text().split('\n')[:-1]
      lengths = np.array([len(line) for line in lines[getattr(part, 'first', 0) or 0 : getattr(part, 'last', None)]])
      yield np.concatenate([np.arange(1, n + 1) for n in lengths]).astype(np.int32), lengths
      yield np.array([], np.int32), np.array([], np.int64)

  vocab = types.SimpleNamespace(size=100, fingerprint=fingerprint)
  return token_cache.CacheEntry('text', [str(path)], vocab, tokenise)


@pytest.fixture
def opened(tmp_path, monkeypatch):
  """Function that opens the cache of a text for a vocabulary."""
  monkeypatch.setattr(blocks, '_BYTES', 32)
  (tmp_path / 'text').write_text(''.join(f'{line}\n' for line in LINES))
  return lambda fingerprint='letters': token_cache.open_entries(
    [entry_of(tmp_path / 'text', fingerprint)], str(tmp_path / 'cache'), quiet=True
  )[0]


@pytest.mark.parametrize('name', ['offsets', 'tokens'])
def test_any_damaged_block_is_made_again(opened, name, capsys):
  path = pathlib.Path(opened().folder) / f'00000.{name}'
  whole = path.read_bytes()
  for place in range(0, len(whole), 32):
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    cache = opened()
    ids, lengths = cache.gather(np.arange(len(LINES)))
    assert lengths.tolist() == [len(line) for line in LINES]
    assert ids.tolist() == [i for line in LINES for i in range(1, len(line) + 1)]
    assert path.read_bytes() == whole and f'block {place // 32} of' in capsys.readouterr().err


def test_an_entry_of_another_vocabulary_stays_and_what_the_text_was_before_goes(opened, tmp_path):
  letters, others = (pathlib.Path(opened(name).folder) for name in ('letters', 'others'))
  assert letters.exists() and others.exists()
  (tmp_path / 'text').write_text('x\n')
  changed = pathlib.Path(opened('others').folder)
  assert changed.exists() and letters.exists() and not others.exists()
