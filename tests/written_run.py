"""A run of a mixture of experts whose log, loads and scores are written by hand, and reports on it."""

import json

from text_lines import write

from lingvo_moe.addons.report import page, reading
from lingvo_moe.storage import files

LAYERS = ('encoder/layer_01', 'decoder/layer_01')
PAIRS = ('aa-en', 'bb-en', 'cc-en')


def write_json(path, value):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(value))


def step_line(step, layers=LAYERS):
  routing = {}
  for layer in layers:
    named = {
      'aux_loss': 1.1,
      'first_dropped': 0.1 / step,
      'second_dropped': 0.2,
      'second_skipped': 0.3,
      'choice_9_dropped': 0.4,
    }
    named |= {'entropy': 1.5, 'z_loss': 2.0, 'rounds': 1.0, 'largest_load': 1.7}
    routing |= {f'moe/{layer}/{name}': value for name, value in named.items()}
  values = {'loss': 8 / step, 'xent': 7 / step, 'grad_norm': 1.0, 'learning_rate': 1e-3, 'target_tokens': 90.0}
  so_far = {'seconds_so_far': 2.0 * step, 'source_tokens_so_far': 100.0 * step, 'target_tokens_so_far': 90.0 * step}
  return {'step': step, **so_far, **values, **routing, 'tokens_per_second': 95.0, 'input_wait_share': 0.01}


def write_run(path, steps=20, layers=LAYERS, pairs=PAIRS, experts=4, model='mt.cldr.Tiny', **values):
  """A run of a mixture of experts: its log, loads of experts, and scores with translations."""
  config = {'data_dir': str(path / 'corpus'), 'pairs': '', 'split_files': [], 'num_experts': experts if layers else 0}
  write_json(path / 'config.json', {'model': model, 'values': {**config, **values}})
  lines = []
  for step in range(1, steps + 1):
    lines.append(step_line(step, layers))
    if step % 10 == 0:
      by_pair = {pair: 1.0 + i for i, pair in enumerate(pairs)}
      lines.append({'step': step, 'seconds_so_far': 2.0 * step + 99, 'dev_loss': 6 / step, 'dev_loss_by_pair': by_pair})
  write(path / 'train.jsonl', map(json.dumps, lines))
  write_json(path / 'finished.json', {'step': steps, 'reason': 'max_steps'})
  if layers:
    every = max(1, -(-steps // 50))
    loads = [0, *range(10, 10 * experts, 10)]  # expert 0 is dead
    found = [
      {'step': s, 'steps': every, 'choices': dict.fromkeys(layers, loads)} for s in range(every, steps + 1, every)
    ]
    write(path / 'routing.jsonl', map(json.dumps, found))
    by_pair = [[7 * (e == i) for e in range(experts)] for i in range(len(pairs))]  # pair i uses expert i alone
    write_json(path / 'dev_routing.json', {'step': steps, 'subsets': pairs, 'choices': dict.fromkeys(layers, by_pair)})
  decoded = path / 'decode' / 'test' / f'step_{steps}'
  scores = {
    pair: {'sentences': 3, 'bleu': 30.0 + i, 'chrf': 50.0 + i, 'copy_bleu': 3.0} for i, pair in enumerate(pairs)
  }
  write_json(decoded / 'scores.json', {'step': steps, 'settings': {}, 'pairs': scores, 'mean': {}})
  for pair in pairs:
    write(decoded / f'{pair}.hyp', ['one', 'two', 'three'])
  return path


def write_corpus(path, pairs=PAIRS, sizes=(10, 30, 20)):
  for pair, size in zip(pairs, sizes):
    language = pair.partition('-')[0]
    for split, count in ('train', size), ('test', 3):
      write(path / pair / f'{split}.{language}', ['eno'] * count)
      write(path / pair / f'{split}.en', ['one'] * count)

  for scores in path.parent.glob('decode/test/*/scores.json'):
    hashes = {}
    for name, word in ((f'{pair}.{side}', word) for pair in pairs for side, word in (('src', 'eno'), ('ref', 'one'))):
      write(scores.parent / name, [word] * 3)
      hashes[name] = files.sha256(str(scores.parent / name))
    write_json(scores, {**json.loads(scores.read_text()), 'hashes': hashes})


def made(*paths, split='test'):
  data_dir = str(paths[0] / 'corpus') if len(paths) == 1 and (paths[0] / 'corpus').exists() else None
  return page.page(reading.read(list(map(str, paths)), split, data_dir))
