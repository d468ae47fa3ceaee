#!/usr/bin/env python
"""python tools/expert_specialization.py RUN --out=DIR [--split=dev] [--max_sentences=50] [--labels=TABLE]

Shows what the experts of a translation run have learnt. Of training: the load of every MoE layer's experts over all
steps, or the first --last_step ones. Of held-out text, with nothing dropped and the decoder reading the references: how
much language and token tell of a token's expert, whether related languages use the same experts, and a plot of the
experts of each language. It writes DIR/experts.md, which is printed too, and DIR/experts.png.

TABLE has what is known of each language, with tabs between columns: language, name, and any labels, such as branch,
family and script; docs/results/m4mini_languages.tsv is one. The plot is of the layer in which language tells most.
"""

import os

from absl import flags

import lingvo_moe
from lingvo_moe.cli import app
from lingvo_moe.core.errors import UserError

_OUT = flags.DEFINE_string('out', None, 'Folder for the page and its plot.', required=True)
_SPLIT = flags.DEFINE_string('split', 'dev', 'The held-out set: test, dev or any file prefix.')
_SENTENCES = flags.DEFINE_integer('max_sentences', 50, 'Lines of each pair; 0: all.', lower_bound=0)
_LABELS = flags.DEFINE_string('labels', None, 'A table with labels of the languages.')
_DATA_DIR = flags.DEFINE_string('data_dir', None, "The corpus; in place of the run's.")
_STEP = flags.DEFINE_integer('step', None, 'Step of the checkpoint; default: the best, or the newest.')
_LAST_STEP = flags.DEFINE_integer(
  'last_step', None, 'Step up to which loads in training are counted; default: all.', lower_bound=1
)
_WITHIN = flags.DEFINE_string('within', None, 'A label, such as script, that neighbours of a language share with it.')
_LAYER = flags.DEFINE_string('layer', None, "The layer to plot, such as 'decoder/layer_03'.")


@app.command(arguments=True)
def main(argv):
  if len(argv) != 2:
    raise UserError(
      f'a page is of one run: tools/expert_specialization.py RUN --out=DIR; saw {" ".join(argv[1:]) or "none"!r}'
    )
  from lingvo_moe.addons.report import reading
  from lingvo_moe.tasks.mt import held_out
  from lingvo_moe.tasks.mt.mt_config import MtConfig
  from lingvo_moe.tasks.task import task_of
  from paper import experts, specialization

  about = experts.read_labels(_LABELS.value) if _LABELS.value else {}
  (record,) = reading.read([argv[1]], _SPLIT.value)
  experts.check_choices(record, about, _WITHIN.value, _LAYER.value)
  run = lingvo_moe.load(argv[1], step=_STEP.value, data_dir=_DATA_DIR.value)
  if not isinstance(run.config, MtConfig):
    raise UserError(f'{argv[1]} holds a run of {run.model}: the page is of models that translate')
  sets = held_out.read(run.config, _SPLIT.value, _SENTENCES.value, task_of(run.config).vocabs[0])
  os.makedirs(_OUT.value, exist_ok=True)  # before the work, which is long
  names = _languages(sets)
  routed = {name: run.routing(s.sources, s.targets, s.tag) for name, s in zip(names, sets)}
  found = experts.Specialization(specialization.collect(routed), names, run.config.num_experts, about)
  last = _LAST_STEP.value or max((span.step for span in record.run.loads), default=0)
  blocks = ['# What experts have learnt', *experts.load_in_training(record, last), f'{_SPLIT.value}, {run.checkpoint}:']
  blocks += [*found.information(), *found.neighbours(_WITHIN.value), *found.plot(_OUT.value, _LAYER.value)]
  text = '\n\n'.join(blocks) + '\n'
  with open(os.path.join(_OUT.value, 'experts.md'), 'w', encoding='utf-8') as f:
    f.write(text)
  print(text, end='')


def _languages(sets) -> list[str]:
  """The language of each pair that is not the same in all pairs; where both sides differ, the pair."""
  sources, targets = [s.source for s in sets], [s.target for s in sets]
  if len(set(targets)) == 1:
    return sources
  return targets if len(set(sources)) == 1 else [s.name for s in sets]


if __name__ == '__main__':
  main()
