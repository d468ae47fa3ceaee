"""tools/mutants.py: which mutants a sample has, and its table."""

import collections
import pathlib
import runpy

TOOL = runpy.run_path(str(pathlib.Path(__file__).resolve().parent.parent.parent / 'tools' / 'mutants.py'))
NAMES = [f'lingvo_moe.{package}.f{n}' for package, count in (('a', 700), ('b', 290), ('c', 10)) for n in range(count)]


def test_a_sample_is_in_proportion_but_ten_of_each_package_and_the_same_for_a_seed():
  sample = TOOL['sample'](NAMES, 100, 1)
  assert collections.Counter(map(TOOL['package'], sample)) == {'a': 70, 'b': 29, 'c': 10}
  assert len(set(sample)) == len(sample) and set(sample) <= set(NAMES)
  assert sample == TOOL['sample'](NAMES, 100, 1) != TOOL['sample'](NAMES, 100, 2)


def test_a_table_counts_by_package_and_names_what_was_not_caught():
  statuses = {'p.b.f1': 'killed', 'p.a.f1': 'survived', 'p.a.f2': 'timeout', 'p.a.f3': 'no tests', 'p.c.f1': 'killed'}
  assert TOOL['table'](['p.a.f1', 'p.a.f2', 'p.a.f3', 'p.b.f1'], statuses).splitlines() == [
    'package       mutants  caught',
    'a                   3       1',
    'b                   1       1',
    'p.a.f1: survived',
    'p.a.f3: no tests',
  ]
