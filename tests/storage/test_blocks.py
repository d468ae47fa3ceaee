"""Arrays in files: a checksum for each block, also where the last one is full."""

import numpy as np
import pytest

from lingvo_moe.storage import blocks


@pytest.mark.parametrize('size', [0, 1, 15, 16, 17, 32, 40])
@pytest.mark.parametrize('step', [1, 7, 64])
def test_an_array_of_any_size_written_in_parts_is_read_back(tmp_path, monkeypatch, size, step):
  monkeypatch.setattr(blocks, '_BYTES', 64)  # 16 items
  values, path = np.arange(1, size + 1, dtype='int32'), str(tmp_path / 'array')
  with open(path, 'wb') as f:
    writer = blocks.Writer(f)
    for start in range(0, size, step):
      writer.append(values[start : start + step])
    writer.close()
  assert len(writer.checksums) == -(-size // 16)
  again = lambda start, end: pytest.fail('a whole block was made again')
  assert blocks.BlockArray(path, 'int32', size, writer.checksums, again)[:].tolist() == values.tolist()
