"""Model card of an export: README.md with what the run knows of its data, training and scores."""

import json
import os

import lingvo_moe
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.quality import METRICS
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.storage import files, json_files, log_directory
from lingvo_moe.storage.log_directory import LogDirectory
from lingvo_moe.tasks.task import TaskConfig, task_of
from lingvo_moe.text import markdown

_CARD = """---
license:  # fill in: that of the weights, by your data and by the model that they began with
language: {languages}
---
# {name}

{model} of {count:,} weights, exported by lingvo_moe {version}.

{facts}
"""


def write(folder: str, run: RunDir, step: int, config: TaskConfig) -> None:
  """Writes README.md for a configuration as it is exported; paths are names alone, as others lack the folders."""
  record, model = LogDirectory.read(run.path), run.load()[0]
  values, examples = record.values, (record.environments or [{}])[-1].get('examples') or {}
  tokens = max((log_directory.tokens_so_far(x) for x in record.train_log() if x.get('step', 0) <= step), default=0)
  facts = {
    'imported from': _noted(run, log_directory.IMPORTED, 'of'),
    'began with the weights of': _noted(run, log_directory.INIT_FROM, 'source'),
    'checkpoint': run.checkpoints().describe(step),
    'data': ', '.join(f'{part} ({count:,} examples)' for part, count in examples.items()),
    'tokens of training': f'{tokens:,.0f}' if tokens else '',
    'merged LoRA adapters': values.get('lora_rank') and f'{values["lora_matrices"]} of rank {values["lora_rank"]}',
  }
  parts = [markdown.table(['', ''], [[name, fact] for name, fact in facts.items() if fact])]
  splits = run.file('decode')
  for split in sorted(files.listdir(splits)) if files.isdir(splits) else ():
    if step in record.decoded_steps(split):
      scores = record.summary(split, step)['pairs']
      shown = {name: metric.title for name, metric in METRICS.items() if all(name in s for s in scores.values())}
      rows = [[pair, f'{s["sentences"]:,}', *(f'{s[name]:.1f}' for name in shown)] for pair, s in scores.items()]
      signatures = sorted({s.get(f'{name}_signature', '') for s in scores.values() for name in shown})
      parts += [f'## Scores on {split}', markdown.table(['pair', 'sentences', *shown.values()], rows, 1)]
      parts.append('\n'.join(f'    {signature}' for signature in signatures))
  text = _CARD.format(
    languages=json.dumps(sorted({language for pair in task_of(config).pairs_of(list(examples)) for language in pair})),
    name=record.name,
    model=model,
    count=weights_lib.count(config.model().weights()),
    version=lingvo_moe.__version__,
    facts='\n\n'.join(parts),
  )
  files.write(os.path.join(folder, 'README.md'), text)


def _noted(run: RunDir, name: str, key: str) -> str:
  """Name of the folder that a file of the run notes; '' where there is none."""
  noted = json_files.read_if_any(run.file(name), **{key: json_files.TEXT})
  return os.path.basename(noted[key].split('/checkpoints/')[0].rstrip('/')) if noted else ''
