"""lingvo-moe models [--model=mt.m4.MoE2048E36L] [--gin_file=F] [--set ff_dim=512] [--json | --page=models]

Without --model, lists the registered models, each with the first line of its docstring. With --model, prints
  what the model is, and how to run it
  its weights: in all, used by a token, by part, and each with its shape
  each field of its configuration: value, meaning, range, and whether a run may change it
Weights are counted from their shapes. None is allocated, so the 1T model takes seconds.

--page=models prints docs/models.md, every model with its size and result. --page=fields prints docs/fields.md, every
field of every configuration by topic.

A token is a source token with the target token that it becomes. It uses encoder and decoder, but only two experts of
each MoE layer; the whole output softmax, which is also the target embedding; and one row of a source embedding.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
import sys
import textwrap

from absl import flags

from lingvo_moe import app
from lingvo_moe.commands import values
from lingvo_moe.core import configuration, fields, markdown, registry
from lingvo_moe.core.errors import UserError

_MODEL = flags.DEFINE_string('model', '', 'Name of a registered model; empty lists them.')
_GIN_FILE = flags.DEFINE_multi_string('gin_file', [], 'File of gin bindings; may be repeated.')
_BINDINGS = values.define('ff_dim=512')
_JSON = flags.DEFINE_bool('json', False, 'Print JSON, for machines.')
_PAGE = flags.DEFINE_enum('page', None, ['models', 'fields'], 'Print the page docs/models.md or docs/fields.md.')

_MODELS_HEAD = """# Models

This page lists every registered model with its size and result. `lingvo-moe models --page=models` makes the page, and
`lingvo-moe models --model=NAME` prints a model's command, weights and fields. **Start here** marks models that train
on a laptop and have a result. Every giant has a sibling `...Tiny` of the same graph."""
_FIELDS_HEAD = """# Fields of a configuration

This page lists every field that `--set NAME=VALUE` can set, by topic. `lingvo-moe models --page=fields` makes the page.
`lingvo-moe models --model=NAME` prints the values of one model."""
_TASKS = {'mt': 'Translation', 'lm': 'Language models', 'switch': 'Span corruption, as T5 is trained'}


def describe(name: str, gin_files=(), gin_bindings=()) -> dict:
  """Description of a model, ready for JSON."""
  # Here and not above, as it brings TensorFlow, whose chatter app.run holds back.
  from lingvo_moe.core import weights as weights_lib
  from lingvo_moe.tasks import sizes

  config = configuration.resolve(name, gin_files, gin_bindings)
  specs = config.model().weights()
  described, rules = {}, fields.specs(type(config))
  for field in dataclasses.fields(config):
    about = {key: getattr(rules[field.name], key) for key in ('meaning', 'rule', 'may_change', 'text')}
    described[field.name] = {'default': field.default, **about}
  return {
    'model': name,
    'about': registry.about(name),
    'weights': weights_lib.count(specs),
    'weights_per_token': sizes.count_per_token(specs, config.moe_gate.experts_per_token(config.num_experts)),
    'experts': sizes.count_experts(specs),
    'parts': sizes.parts(specs),
    'shapes': {n: {'shape': list(s.shape), 'axes': s.dims} for n, s in weights_lib.flatten(specs).items()},
    'config': dataclasses.asdict(config),
    'fields': described,
  }


def models_page() -> str:
  """Markdown page of all models: a section for each module of params/, a row for each model that is no test size."""
  blocks = [_MODELS_HEAD]
  for module, names in itertools.groupby(registry.names(), lambda name: name.rpartition('.')[0]):
    if (task := f'## {_TASKS[module.partition(".")[0]]}') not in blocks:
      blocks.append(task)
    rows = [_row(name, registry.about(name)) for name in names]
    module_doc = inspect.getdoc(sys.modules[f'lingvo_moe.params.{module}']).splitlines()[0]
    blocks += [f'### {module}', module_doc, _table(['model', 'what it is', 'result'], [row for row in rows if row])]
  return '\n\n'.join(blocks)


def _table(columns: list[str], rows: list[list[str]]) -> str:
  return markdown.table(columns, [[cell.replace('|', '\\|') for cell in row] for row in rows])


def _row(name: str, about: str) -> list[str]:
  """Name, first line and result of a model; empty for a size of the tests."""
  result = re.search(r'^Result: +(.*?)(?=\n\S|\n\n|\Z)', about, re.M | re.S)
  if not result and name.endswith('Tiny'):
    return []
  start = '**Start here.** ' if 'Start here' in about else ''
  said = re.sub(r'\s+', ' ', result[1]) if result else 'not yet run'
  return [f'`{name}`', start + about.splitlines()[0].rstrip('.'), said]


def fields_page() -> str:
  """Markdown page of all fields: a section for each class that declares some."""
  blocks, seen = [_FIELDS_HEAD], set()
  for cls in (parent for name in registry.names() for parent in reversed(registry.get(name).__mro__)):
    own = inspect.get_annotations(cls)
    if cls in seen or not dataclasses.is_dataclass(cls) or '.params.' in cls.__module__ or not own:
      continue
    seen.add(cls)
    rows = [[f'`{n}`', f'`{getattr(cls, n)!r}`', s.text] for n, s in fields.specs(cls).items() if n in own]
    title = inspect.getdoc(cls).splitlines()[0].rstrip('.')
    blocks += [f'## {title}', f'Class `{cls.__name__}`.', _table(['field', 'default', 'meaning'], rows)]
  return '\n\n'.join(blocks)


def _text(described: dict) -> str:
  """A description as text; each part with its share of all weights."""
  from lingvo_moe.tasks import sizes

  line = lambda label, n, note='': f'  {label:<24}{n:>22,}  {sizes.short(n):>6}  {note}'.rstrip()
  rows = [line('weights', described['weights']), line('used by a token', described['weights_per_token'])]
  if described['experts']:
    rows.append(line('experts in all', described['experts']))
  parts = [line(part, n, f'{n / described["weights"]:6.1%}') for part, n in described['parts'].items()]
  width = max(map(len, described['shapes']))
  values, shapes = [], []
  for name, shape in described['shapes'].items():
    size = 'x'.join(map(str, shape['shape'])) or 'scalar'
    shapes.append(f'  {name:{width}}  {size:<20} {shape["axes"]}'.rstrip())
  for name, field in described['fields'].items():
    value = described['config'][name]
    bound = '' if value == field['default'] else f' Bound here; {field["default"]!r} by default.'
    values += [f'  {name} = {value!r}', textwrap.indent(textwrap.fill(field['text'] + bound, 112), ' ' * 6)]
  lines = [described['model'], textwrap.indent(described['about'], '  '), '', *rows, '', 'Weights by part', *parts, '']
  lines += ['Shapes, with the letters of their axes', *shapes, '', 'Configuration', *values]
  return '\n'.join(lines)


@app.command()
def main():
  if not _MODEL.value and (_GIN_FILE.value or flags.FLAGS['gin_bindings'].value or flags.FLAGS['set'].value):
    raise UserError('bindings are of one model, and no --model was given: add --model=NAME')
  if _PAGE.value:
    print({'models': models_page, 'fields': fields_page}[_PAGE.value]())
    return
  if _MODEL.value:
    described, text = describe(_MODEL.value, _GIN_FILE.value, _BINDINGS(_MODEL.value)), _text
  else:
    described, text = {name: registry.about(name).splitlines()[0] for name in registry.names()}, _listed
  print(json.dumps(described, indent=2, ensure_ascii=False) if _JSON.value else text(described))


def _listed(described: dict[str, str]) -> str:
  """Every registered model with the first line of its docstring."""
  width = max(map(len, described))
  return '\n'.join(f'{name:<{width}}  {line}' for name, line in described.items())


if __name__ == '__main__':
  main()
