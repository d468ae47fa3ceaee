"""lingvo-moe models [--model=mt.m4.MoE2048E36L] [--gin_file=F] [--set ff_dim=512] [--json]

Without --model, lists the models by task, those of your own first, each with the first line of its docstring. A star
marks those to start with. With --model, prints
  what the model is, and how to run it
  its weights: in all, used by a token, by part, and each with its shape
  each field of its configuration: value, meaning, range, and whether a run may change it
Weights are counted from their shapes. None is allocated, so the 1T model takes seconds.

A token is a source token with the target token that it becomes. It uses encoder and decoder, but only two experts of
each MoE layer; the whole output softmax, which is also the target embedding; and one row of a source embedding.
"""

import dataclasses
import json
import sys
import textwrap
from typing import Any

from lingvo_moe.cli import app
from lingvo_moe.cli.model_flags import FileOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.config import fields, imports, registry
from lingvo_moe.core.errors import UserError

# By the first part of their names: what models of the zoo do, and which of them to start with.
_TASKS = {
  'mt': ('Translation', ('mt.starter.MoE8E', 'mt.cldr.MoE8E')),
  'lm': ('Language models', ('lm.shakespeare.MoE8E',)),
  'switch': ('Span corruption, as T5 and Switch Transformers learn', ('switch.shakespeare.Switch8E',)),
}


class Options(FileOptions):
  """Options of the command."""

  model: str = flag('', 'Name of a registered model; empty lists them.')
  json: bool = flag(False, 'Print JSON, for machines.')


def describe(name: str, config: Any) -> dict[str, Any]:
  """Description of a model with some configuration, ready for JSON."""
  # Here and not above, as it brings TensorFlow, whose chatter app.run holds back.
  from lingvo_moe.core import weights as weights_lib
  from lingvo_moe.models import sizes

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


def _text(described: dict) -> str:
  """A description as text; each part with its share of all weights."""
  from lingvo_moe.models import sizes

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


@app.command(Options)
def main(options: Options) -> None:
  if not options.model and (options.gin_file or options.gin_bindings or options.set):
    raise UserError('bindings are of one model, and no --model was given: add --model=NAME')
  if options.model:
    described, text = describe(options.model, options.resolve(options.model)), _text
  else:
    for module in imports.installed():
      try:
        registry.install([module])
      except UserError as e:
        print(f'left out: {e}', file=sys.stderr)
    names = [*registry.own_names(), *registry.names()]
    described, text = {name: registry.about(name).splitlines()[0] for name in names}, _listed
  print(json.dumps(described, indent=2, ensure_ascii=False) if options.json else text(described))


def _listed(described: dict[str, str]) -> str:
  """The first lines of models by task, and a star at those to start with."""
  width, of_task = max(map(len, described)), {task: [] for task in ('Your own', *(task for task, _ in _TASKS.values()))}
  for name, line in described.items():
    task, start = _TASKS.get(name.partition('.')[0], ('Your own', ()))
    of_task[task].append(f'{"*" if name in start else " "} {name:<{width}}  {line}')
  parts = ['\n'.join([task, *lines]) for task, lines in of_task.items() if lines]
  return '\n\n'.join([*parts, '* start here'])


if __name__ == '__main__':
  main()
