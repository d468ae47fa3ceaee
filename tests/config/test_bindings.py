"""gin bindings: which reach the model, and what the others get."""

import subprocess
import sys

import gin
import pytest

from lingvo_moe.config import bindings, configuration, registry
from lingvo_moe.core.errors import UserError

TINY = 'mt.m4mini.Tiny'  # Tiny(Dense(MtConfig(DataConfig)))
LARGE = 'mt.m4mini.FromEnglishMoE32E'  # FromEnglishMoE32E(FromEnglishDense(Dense(MtConfig)))


def read(*texts, files=(), name=TINY):
  registry.get(name)
  return bindings.read(name, registry.registered(), files, texts)


@pytest.mark.parametrize('parent', ['Dense', 'm4mini.Dense', 'mt.m4mini.Dense', 'MtConfig', 'DataConfig'])
def test_a_binding_to_a_parent_reaches_the_model(parent):
  assert configuration.resolve(TINY, (), [f'{parent}.seed = 9']).seed == 9


def test_a_giants_binding_reaches_its_tiny_sibling():
  assert configuration.resolve('mt.m4.T96LTiny', (), ['T96L.seed = 9']).seed == 9


@pytest.mark.parametrize(
  'field, giver',
  [('num_experts', 'FromEnglishMoE32E'), ('pairs', 'FromEnglishDense'), ('max_steps', 'FromEnglishDense')],
)
def test_a_binding_to_a_parent_that_a_nearer_class_overrides_is_refused(field, giver):
  with pytest.raises(UserError, match=f'for which {giver} sets {field}: write FromEnglishMoE32E.{field} = 8$'):
    read(f'Dense.{field} = 8', name=LARGE)


def test_a_binding_to_the_class_that_sets_a_field_reaches_the_model():
  assert read('FromEnglishDense.max_steps = 8', 'Dense.model_dim = 16', name=LARGE) == {'max_steps': 8, 'model_dim': 16}


def test_of_two_bindings_the_last_counts_unless_it_is_farther_from_the_model():
  assert read('Dense.seed = 1', 'Dense.seed = 2', 'Tiny.seed = 3', 'Tiny.seed = 4') == {'seed': 4}
  with pytest.raises(UserError, match='for which Tiny sets seed: write Tiny.seed = 5$'):
    read('Tiny.seed = 4', 'Dense.seed = 5')


def test_one_file_may_bind_a_family_of_models(tmp_path):
  path = tmp_path / 'all.gin'
  path.write_text('MtConfig.seed = 3\nDense:\n  batch_tokens = 4096\n  temperature = 5\n')

  for name in (LARGE, 'mt.m4mini.MoE8E', 'mt.m4mini.Dense'):
    config = configuration.resolve(name, [str(path)])
    assert (config.seed, config.batch_tokens, config.temperature) == (3, 4096, 5)


def test_a_class_of_the_same_name_elsewhere_is_named_in_full():
  registry.names()

  with pytest.raises(
    UserError, match=r'a value of mt.cldr.Tiny, but .* of which mt.cldr.Tiny is no parent: write Tiny'
  ):
    read('mt.cldr.Tiny.ff_dim = 3')


def test_macros_may_be_defined_after_they_are_used_and_be_made_of_macros():
  texts = 'Tiny.boundaries = (%short, %long)', 'long = %size', 'short = 8\nsize = 32', 'size = 64'

  assert read(*texts) == {'boundaries': (8, 64)}


def test_values_are_literals_of_any_kind():
  text = 'Tiny.pairs = "a" \'b\'\nTiny.packing = True\nTiny.split_files = {"dev": "val"}\nTiny.window = -1  # so'

  assert read(text) == {'pairs': 'ab', 'packing': True, 'split_files': (('dev', 'val'),), 'window': -1}


def test_text_needs_no_quotes_where_a_field_may_hold_none():
  assert read('Tiny.target_normalization = nmt_nfkc') == {'target_normalization': 'nmt_nfkc'}
  assert read('Tiny.target_normalization = None') == {'target_normalization': None}


def test_files_include_files(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'sizes.gin').write_text('Tiny.ff_dim = 48\nTiny.model_dim = %width\n')
  (tmp_path / 'all.gin').write_text("include 'sizes.gin'\ninclude 'sizes.gin'\nwidth = 16\nTiny.ff_dim = 80\n")

  assert read(files=['all.gin']) == {'ff_dim': 80, 'model_dim': 16}
  assert read("include 'all.gin'", 'width = 8') == {'ff_dim': 80, 'model_dim': 8}


def test_a_file_of_an_installed_package_may_be_included_from_any_folder(tmp_path, monkeypatch):
  package = tmp_path / 'planted_sizes' / 'small'
  package.mkdir(parents=True)
  (tmp_path / 'planted_sizes' / '__init__.py').touch()
  (package / '__init__.py').touch()
  (package / 'a.gin').write_text('Tiny.ff_dim = 48\n')
  monkeypatch.setattr(sys, 'path', [*sys.path, str(tmp_path)])

  assert read("include 'planted_sizes/small/a.gin'") == {'ff_dim': 48}


@pytest.mark.parametrize(
  'text, answer',
  [
    ('Tiny.eval_every = (1,', r"gin could not read a binding: .*; saw 'Tiny.eval_every = \(1,' \(bindings are written"),
    ('Tiny.seed = 2\nTiny.ff_dim = = 3\n', "gin could not read a binding: .*; saw 'Tiny.ff_dim = = 3' "),
    ('Tiny.max_steps = many', "Failed to parse token 'many'; saw 'Tiny.max_steps = many' .*and text in quotes"),
    ('Tiny.pairs = {[1]: 2}', 'gin could not read a binding: unhashable type'),
    ('Tiny.ff_dim = ' + '(' * 3000, 'gin could not read a binding: '),
    ('Tiny:', 'gin could not read a binding: Expected indentation'),
    ('Nobody.nothing = 3', r"^'Nobody' is not the chosen model; .*: write Tiny.<field> = 3$"),
    ('MoE8E.ff = 3', "^Tiny has no field 'ff'; closest: ff_dim$"),
    ('Dense.ff = 3', "^Tiny has no field 'ff'; closest: ff_dim$"),
    ('Tiny.ff_dim = %size', '^%size is not defined; known: none: write size = <value>$'),
    ('sizes = 3\nTiny.ff_dim = %size', '^%size is not defined; closest: sizes: write size = <value>$'),
    ('a = %a\nTiny.ff_dim = %a', '^a macro has a value of its own; saw %a = %a: write a = <value>$'),
    (
      'a = (1, %b)\nb = [%a]\nTiny.ff_dim = %b',
      '^a macro has a value of its own; saw %b = %a = %b: write b = <value>$',
    ),
    ('size = 3', '^size binds no value of the model: write Tiny.<field> = %size$'),
    ('a = 3\nff_dim = (%a,)', r'binds no value of the model: write Tiny'),
    ('x/size = 3', '^x/size binds no value of the model: write Tiny.<field> = 3$'),
    ('x/Tiny:\n  ff_dim = 3', '^x/Tiny.ff_dim binds no value of the model: write Tiny.ff_dim = 3$'),
    ('Tiny.optimizer = @gin.singleton()', r'^bindings bind values, .*; saw @gin.singleton\(\): write a value$'),
    ('Tiny.split_files = ((@a/b, 3),)', '^bindings bind values, .*; saw @a/b: write a value$'),
    (
      'from os import path as p',
      "^bindings bind values and import nothing; saw 'from os import path as p': take it out$",
    ),
    ("include '/no/such.gin'", "^include '/no/such.gin': there is no such file$"),
    ("include 'no_such_package/such.gin'", "^include 'no_such_package/such.gin': there is no such file$"),
    ("include '/'", "^include '/' cannot be read as UTF-8 text: .*directory"),
    (r"include 'a\0b'", 'cannot be read as UTF-8 text: embedded null byte'),
  ],
)
def test_a_statement_that_binds_nothing_gets_the_line_to_type(text, answer):
  with pytest.raises(UserError, match=answer) as caught:
    read(text)

  assert '\n' not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
  'path', ['this/x/y.gin', 'this/y.gin', '__main__/x/y.gin', 'lingvo_moe/cli/commands/vocab/y.gin']
)
def test_an_include_imports_nothing(path):
  code = (
    'import sys; from lingvo_moe.config import bindings\n'
    'before = set(sys.modules)\n'
    f'print(bindings._located({path!r})); print(*(set(sys.modules) - before))'
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  located, imported = done.stdout.splitlines()
  assert located.endswith(path) and not imported


def test_an_import_in_a_binding_imports_nothing():
  with pytest.raises(UserError):
    read('import antigravity')

  assert 'antigravity' not in sys.modules


def test_files_that_include_themselves_are_named(tmp_path):
  first, second = tmp_path / 'a.gin', tmp_path / 'b.gin'
  first.write_text(f"Tiny.ff_dim = 8\ninclude '{second}'\n")
  second.write_text(f"include '{tmp_path}/../{tmp_path.name}/a.gin'\n")

  with pytest.raises(
    UserError, match=f"^--gin_file={first}: include '{second}': include '.*a.gin' includes itself: take"
  ):
    read(files=[str(first)])


def test_a_mistake_in_an_included_file_names_the_way_to_it(tmp_path):
  (tmp_path / 'b.gin').write_text('size = %size\nTiny.ff_dim = %size\n')
  (tmp_path / 'a.gin').write_text(f"include '{tmp_path}/b.gin'\n")

  with pytest.raises(
    UserError, match=f"^--gin_file={tmp_path}/a.gin: include '{tmp_path}/b.gin': a macro has a value of"
  ):
    read(files=[str(tmp_path / 'a.gin')])


def test_gin_bindings_of_a_program_are_its_own(tmp_path):
  cls = registry.get(TINY)
  gin.parse_config('mt.m4mini.Tiny.seed = 5')
  try:
    bound = gin.config_str()
    resolved = configuration.resolve(TINY, (), ['Tiny.ff_dim = 48'])
    configuration.save(TINY, resolved, str(tmp_path / 'config.json'))
    loaded = configuration.load(str(tmp_path / 'config.json'))[1]

    assert (resolved.ff_dim, resolved.seed, loaded) == (48, cls.seed, resolved)
    assert gin.config_str() == bound
    assert cls().seed == 5
    with pytest.raises(UserError, match='^mt.m4mini.Tiny: ff_dim must be at least 1; saw 0'):
      configuration.resolve(TINY, (), ['Tiny.ff_dim = 0'])
    assert gin.config_str() == bound
  finally:
    gin.clear_config()


def test_the_word_auto_needs_no_quotes_where_a_number_may_stand_too():
  assert read('Tiny.capacity_factor = auto') == {'capacity_factor': 'auto'}
  assert read('Tiny.capacity_factor = 1.5') == {'capacity_factor': 1.5}
  with pytest.raises(UserError, match="capacity_factor must be a number, 'auto' or None; saw 'autto'"):
    configuration.resolve(TINY, (), ['Tiny.capacity_factor = autto'])
