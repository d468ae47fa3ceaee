"""Input of any kind, drawn by hypothesis, is taken or rejected in one line. CONTRIBUTING.md has a longer run."""

import contextlib
import gzip
import itertools
import pathlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.config import configuration, fields, registry
from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.corpora import documents as plain_text
from lingvo_moe.corpora import pair_files, parallel, preparation, text
from lingvo_moe.runtime import chips, local, torus_placement
from lingvo_moe.storage import files

MODELS = ('mt.cldr.Tiny', 'mt.m4mini.Tiny', 'lm.shakespeare.Tiny', 'switch.shakespeare.Tiny')
NUMBERS = itertools.count()


@contextlib.contextmanager
def refused_in_one_line():
  """Lets a UserError of one line pass, and no other error."""
  try:
    yield
  except UserError as e:
    assert '\n' not in str(e), repr(e)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Makes empty folders."""
  parent = tmp_path_factory.mktemp('any')

  def make():
    path = parent / str(next(NUMBERS))
    path.mkdir()
    return path

  return make


INTEGERS = st.integers(-3, 70) | st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63, -(2**31), 10**20, 10**400])
FLOATS = st.floats() | st.sampled_from(['1e400', '-1e400', '1e-400'])
WORDS = st.sampled_from(
  ['%x', '%y', '@Tiny', '@Tiny()', '@a/b()', '%', '@', 'None', 'True', 'de-en', "'de-en'", '0x' + 'f' * 5000]
)
LEAVES = INTEGERS.filter(lambda n: abs(n) < 10**400).map(repr) | FLOATS.map(str) | WORDS | st.text(max_size=8).map(repr)
VALUES = st.recursive(
  LEAVES,
  lambda inner: (
    st.lists(inner, max_size=3).map(lambda parts: f'({", ".join(parts)},)')
    | st.lists(inner, max_size=3).map(lambda parts: f'[{", ".join(parts)}]')
    | st.tuples(inner, inner).map(lambda pair: f'{{{pair[0]}: {pair[1]}}}')
  ),
  max_leaves=6,
)
KEYS = st.sampled_from(MODELS).flatmap(lambda name: st.sampled_from(sorted(fields.specs(registry.get(name)))))
LINES = (
  st.builds('Tiny.{} = {}'.format, KEYS, VALUES)
  | st.sampled_from(['Tiny.seed = 7', 'Tiny.learning_rate = 1e-3', "Tiny.dispatch = 'gather'", 'Tiny.num_experts = 0'])
  | st.builds('{} = {}'.format, st.sampled_from(['x', 'y', 'Tiny.x', 'a/Tiny.ff_dim', 'Dense.ff_dim', '']), VALUES)
  | st.sampled_from(
    ['import this', 'from os import path', "include '/dev/null'", "include 'x.gin'", 'Tiny:', '  seed = 1']
  )
  | st.text(max_size=20)
)


@given(st.sampled_from(MODELS), st.lists(LINES, min_size=1, max_size=4), st.booleans())
def test_any_binding_is_taken_or_refused_in_one_line(name, lines, in_one):
  modules = set(sys.modules)

  with refused_in_one_line():
    config = configuration.resolve(name, (), ['\n'.join(lines)] if in_one else lines)
    if max(getattr(config, f, 0) for f in ('encoder_layers', 'decoder_layers', 'num_layers')) < 100:
      local.check_fits(config.program())

  assert 'this' not in set(sys.modules) - modules


@given(
  st.binary(max_size=60) | st.lists(LINES, max_size=4).map(lambda lines: '\n'.join(lines).encode('utf-8', 'replace'))
)
def test_any_gin_file_is_taken_or_refused_in_one_line(folder, data):
  path = folder() / 'a.gin'
  path.write_bytes(data)

  with refused_in_one_line():
    configuration.resolve(MODELS[0], [str(path)])


@given(
  st.text(max_size=30)
  | st.sampled_from(registry.names()).flatmap(
    lambda name: st.sampled_from([name, f'{name}.{name}', f' {name}', name + '\0'])
  )
)
def test_any_model_name_is_found_or_refused_in_one_line(name):
  with refused_in_one_line():
    assert registry.name_of(registry.get(name)) == name


SIZES = INTEGERS.map(shown) | st.sampled_from(['', '٣', '0x2', '9' * 5000, '1e3', '-0', '+2', '2_0'])
AXES = st.sampled_from(['data', 'expert', 'node', 'model', 'hidden', 'Data', '', 'e xpert', 'data:2'])
MESHES = (
  st.lists(
    st.tuples(st.sampled_from(['data', 'expert', 'node', 'model', 'hidden']), st.sampled_from([1, 2, 4, 300])),
    unique_by=lambda part: part[0],
    max_size=4,
  ).map(lambda parts: ','.join(f'{axis}:{size}' for axis, size in parts))
  | st.lists(st.builds('{}:{}'.format, AXES, SIZES), max_size=4).map(','.join)
  | st.text(',:/ 0123dataexpert', max_size=20)
  | st.text(max_size=10)
)


@given(MESHES)
def test_any_mesh_is_taken_or_refused_in_one_line(text):
  with refused_in_one_line():
    mesh = Mesh.parse(text)
    assert mesh.num_devices <= 65_536
    assert str(mesh) == 'one device' or Mesh.parse(str(mesh)) == mesh


GRIDS = st.lists(SIZES, max_size=4).map('x'.join)


SLICES = st.sampled_from(['v3:4x4', 'v5e:4x4', 'v4:2x2x4']) | st.builds(
  '{}:{}'.format, st.sampled_from([*chips.CHIPS, 'v9', '']), GRIDS
)
BOXES = st.sampled_from(['expert:4x4', 'expert:2x8', 'expert:2x2x4', 'expert:4x2']) | st.builds(
  '{}:{}'.format, AXES, GRIDS
)


@given(SLICES, BOXES)
def test_any_placement_is_taken_or_refused_in_one_line(of_slice, box):
  with refused_in_one_line():
    topology = chips.Topology.parse(of_slice)
    placed = torus_placement.place(Mesh((('expert', topology.num_devices),)), topology, box)
    assert placed.num_devices == topology.num_devices


SIDES = st.binary(max_size=80) | st.lists(st.text(max_size=12), max_size=6).map(
  lambda lines: '\n'.join(lines).encode('utf-8', 'replace')
)
PACKED = st.sampled_from(
  [lambda data: data, gzip.compress, lambda data: gzip.compress(data)[:-5], lambda data: gzip.compress(data) * 2]
)


@given(SIDES, SIDES, PACKED, st.sampled_from(['', '.gz']))
def test_any_corpus_is_read_or_refused_in_one_line(folder, source, target, packed, end):
  pair = folder() / 'de-en'
  pair.mkdir()
  for split, language, data in (('train', 'de', source), ('train', 'en', target), ('dev', 'txt', source)):
    (pair / f'{split}.{language}{end}').write_bytes(packed(data))

  with refused_in_one_line():
    (found,) = parallel.find_pairs(str(pair.parent), 'de-en')
    sources, targets = parallel.read_pair(found)
    assert len(sources) == len(targets) and all('\n' not in line for line in sources)
  with refused_in_one_line():
    texts = pair_files.Texts(*(str(pair / f'train.{language}{end}') for language in ('de', 'en')))
    preparation.examine(texts, preparation.Rules(dev=1, test=1))
  with refused_in_one_line():
    list(plain_text.documents(plain_text.find_files(str(pair), 'dev')[0], 'paragraph'))


@given(st.lists(st.binary(max_size=6).filter(lambda line: b'\n' not in line), max_size=9))
def test_lines_are_those_that_python_reads(folder, lines):
  lines = [b'a text file begins so, and has less than one NUL in 50 bytes'] + [
    line.replace(b'\0', b'') for line in lines
  ]
  path = folder() / 'a.gz'
  path.write_bytes(gzip.compress(b'\n'.join(lines)))
  expected = [line.rstrip(b'\r\n') for line in gzip.open(path)]

  assert [line for batch in text.line_batches(str(path), size=2, strict=False) for line in batch] == expected


@given(st.text(max_size=12), st.sampled_from(['gs', 's3', 'https', 'C', 'a+b', '']), st.text(max_size=12))
def test_a_path_with_a_scheme_is_refused_and_no_other(before, scheme, after):
  path = f'{scheme}://{after}'
  if scheme:
    with pytest.raises(UserError, match='is a path of a file system that is mounted'):
      files.check_scheme('--out', path)
    files.check_scheme('--out', path, {scheme})
  files.check_scheme('--out', f'./{before}{path}')
  files.check_scheme('--out', pathlib.Path('a/b'))
