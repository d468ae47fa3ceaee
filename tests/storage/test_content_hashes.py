"""Hashes of files: of large ones by samples from their beginning to their end."""

import pytest

from lingvo_moe.storage import content_hashes


@pytest.fixture
def sampled(tmp_path, monkeypatch):
  """Function that hashes contents by 4 samples of 10 bytes."""
  for name, value in (('_WHOLE', 99), ('_SAMPLES', 4), ('_SAMPLE', 10)):
    monkeypatch.setattr(content_hashes, name, value)

  def hashed(data):
    (tmp_path / 'file').write_bytes(data)
    return content_hashes._hash(str(tmp_path / 'file'), len(data), lambda size: None)

  return hashed


def test_a_large_file_is_hashed_by_samples_that_reach_both_ends(sampled):
  data = bytearray(100)
  before, seen = sampled(bytes(data)), set()
  for place in range(100):
    data[place] = 1
    seen |= {place} if sampled(bytes(data)) != before else set()
    data[place] = 0
  assert before.startswith('sampled:')
  assert seen == {*range(10), *range(30, 40), *range(60, 70), *range(90, 100)}


def test_the_size_counts_and_a_file_of_the_largest_size_is_hashed_whole(sampled):
  assert sampled(bytes(100)) != sampled(bytes(101))
  assert not sampled(bytes(99)).startswith('sampled:') and sampled(bytes(99)) != sampled(bytes(50) + b'x' + bytes(48))
