"""Small JSON files: every damage is either noticed, with a line that names the file, or changes nothing."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import json_files

values = st.recursive(
  st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
  lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
  max_leaves=12,
)


@given(st.dictionaries(st.text().filter(lambda name: name != 'crc32'), values, max_size=5))
@settings(max_examples=60)
def test_what_was_dumped_is_parsed_to_the_same(value):
  assert json_files.parse(json_files.dump(value)) == value


def test_any_flipped_bit_is_noticed_or_changes_no_value():
  value = {'model': 'mt.cldr.Tiny', 'values': {'rate': 0.5, 'names': ['ü', 'b'], 'sizes': [1, 20, 300], 'x': None}}
  data = json_files.dump(value, indent=1).encode()
  noticed = 0
  for at in range(len(data)):
    for bit in range(8):
      damaged = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
      try:
        found = json_files.parse(damaged)
      except ValueError:
        noticed += 1
      else:
        assert {name: found[name] for name in value} == value  # white space, or the checksum's own name
  assert noticed > 7 * len(data)


@pytest.mark.parametrize(
  'text, seen',
  [
    ('', 'is not JSON'),
    ('{"a": ', 'is not JSON'),
    (b'{"a": "\xff"}', 'is not JSON'),
    ('[' * 100_000, 'brackets too deep in each other'),
    ('{"a": ' * 40 + '1' + '}' * 40, 'brackets more than 32 deep'),
    ('null', 'no JSON object, but None'),
    ('[]', 'no JSON object, but []'),
    ('{"a": "x", "n": 1}', "'a' must be an integer; saw 'x'"),
    ('{"a": true, "n": 1}', "'a' must be an integer; saw True"),
    ('{"n": 1}', "'a' must be an integer; saw none"),
    ('{"a": 1, "n": {"b": "c"}}', "'n' must be an object, each value a number or null or null; saw {'b': 'c'}"),
    ('{"a": ' + '9' * 25 + '}', 'an integer has more than 64 bits'),
    ('{"a": ' + '9' * 5000 + '}', 'an integer has more than 64 bits'),
    ('{"a": 1, "crc32": "00000000"}', 'it was changed since it was written: its crc32 is'),
    ('{"a": 1, "crc32": ["x"]}', 'it was changed since it was written'),
    ('{"a": 1, "n": {"x": true}}', "'n' must be an object, each value a number or null or null; saw"),
    ('{"a": 1, "crc32": ""}', 'it was changed since it was written'),
    ('{"a": 1, "crc32": null}', 'it was changed since it was written'),
  ],
)
def test_a_damaged_file_is_named_with_what_was_seen_and_the_way_out(tmp_path, text, seen):
  path = tmp_path / 'small.json'
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  kinds = {
    'a': json_files.INTEGER,
    'n': json_files.optional(json_files.by_name(json_files.optional(json_files.NUMBER))),
  }
  with pytest.raises(UserError) as caught:
    json_files.read(str(path), 'what it was', 'make it again', **kinds)
  message = str(caught.value)
  assert message.startswith(f'{path} is not ') and seen in message and message.endswith(': make it again')
  assert len(message.splitlines()) == 1 and len(message) < 400


def test_a_file_beyond_any_size_is_not_read_whole(tmp_path, monkeypatch):
  monkeypatch.setattr(json_files, 'MOST_BYTES', 1 << 10)
  (tmp_path / 'big').write_text('{"a": "' + 'x' * 2000 + '"}')
  with pytest.raises(UserError, match='over'):
    json_files.read(str(tmp_path / 'big'), 'small', 'remove it')
  with pytest.raises(UserError, match='line 1 is not'):
    list(json_files.lines(str(tmp_path / 'big')))


def test_lines_are_named_by_number_and_a_last_one_cut_short_is_left_out(tmp_path):
  path = tmp_path / 'train.jsonl'
  path.write_text('{"step": 1}\n{"step": 2, "lo')
  assert list(json_files.lines(str(path))) == [('{"step": 1}\n', {'step': 1})]
  path.write_text('{"step": 1}\n{"step": 2}')  # whole, but for its end
  assert [line for line, _ in json_files.lines(str(path))] == ['{"step": 1}\n', '{"step": 2}\n']
  for line in ('{"step": "a"}', 'null', '{"step": 1, "lo', '\0\0', '[' * 9000, '{"step": 1, "loss": "x"}'):
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(UserError, match=r'train.jsonl is a JSON object with its step; line 2 is not .*: restore'):
      list(json_files.lines(str(path), loss=json_files.optional(json_files.NUMBER)))


def test_a_file_of_an_earlier_version_has_no_checksum_and_is_read():
  assert json_files.parse(json.dumps({'a': 1})) == {'a': 1}
