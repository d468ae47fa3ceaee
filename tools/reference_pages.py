#!/usr/bin/env python
"""python tools/reference_pages.py --page=models

Prints a page of the documentation that is made from the registered models: --page=models prints docs/models.md, every
model with its size and result; --page=fields prints docs/fields.md, every field of every configuration by topic.
"""

import dataclasses
import inspect
import itertools
import re
import sys

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.config import fields, registry
from lingvo_moe.text import markdown

_PAGE = flags.DEFINE_enum('page', None, ['models', 'fields'], 'The page to print.', required=True)

_MODELS_HEAD = """# Models

This page lists every registered model with its size and result. `python tools/reference_pages.py --page=models` makes
the page, and `lingvo-moe models --model=NAME` prints a model's command, weights and fields. **Start here** marks models
that train on a laptop and have a result. Every giant has a sibling `...Tiny` of the same graph."""
_FIELDS_HEAD = """# Fields of a configuration

This page lists every field that `--set NAME=VALUE` can set, by topic.

A *field* is a named value of a model's configuration, such as `num_experts = 8`. Fields describe the model, its data,
its training and its decoding. A registered model is a class with values for them; `--set` changes a value for one run:

```sh
lingvo-moe models --model=mt.cldr.MoE8E --set num_experts=16
```

The command prints all values of the model. A run records its values in `config.json`. *A run may change it* marks a
field that may have another value when a run continues; a run keeps each value until it is set again. *Only with* names
the values of other fields with which a field has an effect. A value without effect that `--set`, a gin binding or the
line of a registered class gives to a field is an error. `has_dense_layers` means that not every layer has experts, and
`samples_nbest` that `source_sampling` or `target_sampling` has `nbest`.
`python tools/reference_pages.py --page=fields` makes the page."""
_NEXT = {
  'models': """## Next

- [fields.md](fields.md): the fields of a model.
- [own_text.md](own_text.md): train one on your own text.
- [quality.md](quality.md): what experts gain.""",
  'fields': """## Next

- [models.md](models.md): models with their values.
- [add_a_model.md](add_a_model.md): a model of your own, with fields of its own.""",
}
_TASKS = {'mt': 'Translation', 'lm': 'Language models', 'switch': 'Span corruption, as T5 is trained'}


def models_page() -> str:
  """Markdown page of all models: a section for each module of params/, a row for each model that is no test size."""
  blocks = [_MODELS_HEAD]
  for module, names in itertools.groupby(registry.names(), lambda name: name.rpartition('.')[0]):
    if (task := f'## {_TASKS[module.partition(".")[0]]}') not in blocks:
      blocks.append(task)
    rows = [_row(name, registry.about(name)) for name in names]
    module_doc = inspect.getdoc(sys.modules[f'lingvo_moe.params.{module}']).splitlines()[0]
    blocks += [f'### {module}', module_doc, _table(['model', 'what it is', 'result'], [row for row in rows if row])]
  return '\n\n'.join([*blocks, _NEXT['models']])


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
  return '\n\n'.join([*blocks, _NEXT['fields']])


@app.command()
def main():
  print({'models': models_page, 'fields': fields_page}[_PAGE.value]())


if __name__ == '__main__':
  main()
