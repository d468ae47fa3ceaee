"""Which tests a change needs, in a checkout that is written here."""

import changed_tests
import pytest
from changed_tests import Checkout

FILES = {
  'lingvo_moe/core/axes.py': '',
  'lingvo_moe/layers/moe.py': 'from lingvo_moe.core import axes\n',
  'lingvo_moe/layers/stack.py': 'def f():\n  from lingvo_moe.layers.moe import MoE\n',
  'lingvo_moe/trainer.py': 'import lingvo_moe.layers.stack\n',
  'params/mt/cldr.py': 'from lingvo_moe.layers import stack\n',
  'tools/bench.py': 'from benchmarks import steps\n',
  'tools/benchmarks/steps.py': '',
  'tools/quickstart': '#!/bin/sh\n',
  'docs/fields.md': '',
  'tests/forks.py': '',
  'tests/core/test_axes.py': 'from lingvo_moe.core import axes\n',
  'tests/layers/test_moe.py': '',  # a mirror by its name
  'tests/layers/test_stack.py': 'from lingvo_moe.layers import stack\n',
  'tests/test_trainer.py': 'import forks\nfrom lingvo_moe import trainer\n',
  'tests/tools/test_bench_tool.py': 'command = "tools/quickstart"\n',
  'tests/test_zoo.py': '',
  'tests/test_docs.py': "NAME = 'mt.cldr.MoE8E'\n",
}


@pytest.fixture
def checkout(tmp_path):
  for name, text in FILES.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  return Checkout(tmp_path, [*FILES, 'tests/core/test_gone.py'])


@pytest.mark.parametrize(
  'changed, chosen, further',
  [
    (
      'lingvo_moe/core/axes.py',
      ['core/test_axes.py', 'layers/test_moe.py'],
      ['layers/test_stack.py', 'test_trainer.py'],
    ),
    ('lingvo_moe/layers/moe.py', ['layers/test_moe.py', 'layers/test_stack.py'], ['test_trainer.py']),
    ('lingvo_moe/layers/stack.py', ['layers/test_stack.py', 'test_trainer.py'], []),
    ('lingvo_moe/trainer.py', ['test_trainer.py'], []),
    ('params/mt/cldr.py', ['test_docs.py', 'test_zoo.py'], []),
    ('tools/benchmarks/steps.py', ['tools/test_bench_tool.py'], []),
    ('tools/quickstart', ['tools/test_bench_tool.py'], []),
    ('docs/fields.md', ['test_docs.py'], []),
    ('tests/forks.py', ['test_trainer.py'], []),
    ('tests/test_zoo.py', ['test_zoo.py'], []),
    ('tests/core/test_gone.py', [], []),  # removed
  ],
)
def test_a_change_needs_the_tests_of_its_file_and_of_those_that_import_it(checkout, changed, chosen, further):
  in_tests = lambda files: [f'tests/{name}' for name in files]
  assert checkout.chosen([changed]) == in_tests(chosen)
  assert [test for test in checkout.dependent([changed]) if test not in in_tests(chosen)] == in_tests(further)


def test_files_that_took_least_come_first_and_unknown_ones_last():
  assert changed_tests.by_seconds(['a', 'b', 'c'], {'a': 2.0, 'c': 1.0}) == ['c', 'a', 'b']


def test_a_commit_that_is_not_there_is_answered_in_one_line():
  with pytest.raises(SystemExit, match=r'\Aerror: git diff failed: [^\n]*gone[^\n]*\Z'):
    changed_tests.main(['--since=gone'])
