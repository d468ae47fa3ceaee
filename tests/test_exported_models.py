"""lingvo-moe export: what it writes works without this package, and gives what translate gives."""

import dataclasses
import doctest
import json
import os
import pathlib
import random
import re
import shutil

import forks
import numpy as np
import pytest
import tensorflow as tf
import toy_run as toy

import lingvo_moe
from lingvo_moe import decoder
from lingvo_moe.addons.export.text_search import TextSearch
from lingvo_moe.cli.commands import export
from lingvo_moe.config import configuration
from lingvo_moe.core.errors import UserError
from lingvo_moe.inputs.mt_input import TextInput
from lingvo_moe.tasks.task import task_of

SENTENCES = [source for source, _ in toy.sentences()]
LINES = [*SENTENCES[:3], '', 'Eine Katze\ufeff singt\x00.', '   ', '日本', 'Hund ' * 60, *SENTENCES[12:15]]

# Reads lines from a file, and writes what an exported model makes of them. None in place of a module is an ImportError
# for whoever imports it.
USER = """
import json, sys
sys.modules['lingvo_moe'] = None
import tensorflow as tf
import tensorflow_text
model = tf.saved_model.load(sys.argv[1])
lines = json.load(open(sys.argv[2]))
found = {name: x.numpy().tolist() for name, x in model.signatures['serving_default'](lines=tf.constant(lines)).items()}
found['text'] = [text.decode() for text in found['text']]
by_name = model.translate(lines=tf.constant(lines))['text'].numpy().tolist()
assert [text.decode() for text in by_name] == found['text']
found['none'] = model.translate(tf.zeros([0], tf.string))['text'].shape[0]
json.dump(found, open(sys.argv[3], 'w'))
"""


def use(model: pathlib.Path, lines: list[str], folder: pathlib.Path) -> dict:
  (folder / 'lines.json').write_text(json.dumps(lines))
  command = ['-c', USER, model, folder / 'lines.json', folder / 'found.json']
  done = forks.run(command, timeout=300)
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads((folder / 'found.json').read_text())


@pytest.fixture(scope='module')
def saved(toy_run, tmp_path_factory):
  out = tmp_path_factory.mktemp('saved') / 'model'
  export.export(export.Options(toy_run.path, out=str(out)))
  return out


def test_a_saved_model_gives_what_translate_gives_in_a_process_without_this_package(toy_run, saved, tmp_path):
  found = use(saved, LINES, tmp_path)
  with pytest.warns(UserWarning, match='sentence 7 is over max_length=32'):
    expected = lingvo_moe.load(toy_run.path, split_sentences='never').translate(LINES, scores=True)
  assert found['text'] == [h.text for h in expected]
  assert len(set(found['text'])) > 7  # it has learnt something
  np.testing.assert_allclose(found['score'], [h.score for h in expected], atol=1e-5)
  np.testing.assert_allclose(found['log_prob'], [h.log_prob for h in expected], atol=1e-5)
  assert [i for i, cut in enumerate(found['truncated']) if cut] == [7]
  assert found['none'] == 0


def test_a_saved_model_says_what_it_takes_and_gives(toy_run, saved):
  about = json.loads((saved / 'assets.extra' / 'about.json').read_text())
  assert about['model'] == toy.MODEL and about['step'] == toy.STEPS
  assert list(about['inputs']) == ['lines'] and list(about['outputs']) == ['text', 'score', 'log_prob', 'truncated']
  assert os.listdir(saved.parent) == ['model']  # nothing is left beside it


def test_vocabularies_outside_the_log_directory_are_exported_if_trusted(toy_run, tmp_path):
  run = tmp_path / 'run'
  shutil.copytree(toy_run.path, run)
  os.rename(run / 'vocab', tmp_path / 'vocab')
  config = json.loads((run / 'config.json').read_text().replace('"vocab/', '"../vocab/'))
  del config['crc32']
  (run / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match='serve or export with --vocab_outside'):
    export.export(export.Options(str(run), out=str(tmp_path / 'model')))
  export.export(export.Options(str(run), out=str(tmp_path / 'model'), vocab_outside=True))
  assert (tmp_path / 'model' / 'saved_model.pb').exists()


def write_lines(folder: pathlib.Path, lines: int) -> list[str]:
  """A corpus of test text, of one to three of the sentences in a line; returns the source lines."""
  rng = random.Random(0)
  (folder / 'de-en').mkdir(parents=True)
  chosen = [rng.choices(toy.sentences(), k=rng.randint(1, 3)) for _ in range(lines)]
  for side, language in enumerate(('de', 'en')):
    text = [' '.join(pair[side] for pair in pairs) for pairs in chosen]
    (folder / 'de-en' / f'test.{language}').write_text('\n'.join(text) + '\n', encoding='utf-8')
  return (folder / 'de-en' / 'test.de').read_text(encoding='utf-8').splitlines()


@pytest.mark.slow
def test_200_lines_are_translated_as_by_the_decoder(toy_run, saved, tmp_path):
  lines = write_lines(tmp_path / 'corpus', 200)
  options = {'split': 'test', 'once': True, 'data_dir': str(tmp_path / 'corpus'), 'out': str(tmp_path / 'out')}
  decoder.decode(decoder.Options(toy_run.path, **options))
  (hyp,) = (tmp_path / 'out').rglob('de-en.hyp')
  assert use(saved, lines, tmp_path)['text'] == hyp.read_text(encoding='utf-8').splitlines()


class TaggedVocab:
  """A run's source vocabulary, with two of its pieces as tags."""

  def __init__(self, vocab):
    self._vocab = vocab
    self._ids = dict(zip(('xx', 'yy'), range(7, 9)))

  def tags(self):
    return list(self._ids)

  def tag_id(self, language):
    return self._ids[language]

  def __getattr__(self, name):
    return getattr(self._vocab, name)


def test_tokens_tags_and_cuts_are_those_of_the_translators_input(toy_run):
  config = toy_run.load_config()
  source, target = task_of(config).vocabs
  config, vocabs = dataclasses.replace(config, tag_target=True), (TaggedVocab(source), target)
  function = TextSearch(config, vocabs)
  assert list(function.inputs) == ['lines', 'target'] and 'xx, yy' in function.about['inputs']['target']
  for languages in ('yy', ['yy'], ['xx', 'yy'] * 4):
    ids_BT, lengths_B, truncated_B = (
      x.numpy()
      for x in function._tokenize(tf.constant(LINES[:8]), function._tag_ids(8, tf.constant(languages), 'target'))
    )
    for i, line in enumerate(LINES[:8]):
      language = languages if isinstance(languages, str) else (languages * 8)[i]
      expected = TextInput(config, vocabs, [line], language)
      assert bool(truncated_B[i]) == (expected.truncated == [0])
      ids = [] if expected.empty else next(iter(expected))[1]['src_ids'][0]
      assert ids_BT[i, : lengths_B[i]].tolist() == [n for n in ids if n]
  with pytest.raises(tf.errors.InvalidArgumentError, match='target must be one of the languages xx, yy; saw'):
    function._tag_ids(1, tf.constant('zz'), 'target')


@pytest.mark.slow
def test_half_of_the_experts_make_a_smaller_model_and_bleu_is_printed(toy_run, tmp_path, capsys):
  out = tmp_path / 'half'
  export.export(export.Options(toy_run.path, out=str(out), languages=['de'], keep_experts=0.5, split='dev'))
  said = capsys.readouterr().out
  for layer in 'encoder/layer_00', 'decoder/layer_00':
    assert f'{layer}: 2 of 4 experts, which have ' in said
  assert 'BLEU on dev, 4 experts -> 2' in said and 'de-en' in said
  reader = tf.train.load_checkpoint(str(out / 'variables' / 'variables'))
  shapes = {name: shape for name, shape in reader.get_variable_to_shape_map().items() if 'moe' in name}
  assert [shape for name, shape in shapes.items() if '.Swi/' in name] == [[2, 32, 64]] * 2
  assert [shape for name, shape in shapes.items() if '.Sgate/' in name] == [[32, 2]] * 2
  assert len(use(out, LINES, tmp_path)['text']) == len(LINES)


def test_mistakes_are_answered_and_leave_nothing(toy_run, saved, tmp_path):
  out = str(tmp_path / 'out')
  wrong = {
    'exists: an export goes to a new directory': {'out': str(saved)},
    'CTranslate2 has no mixture of experts, and this model has num_experts=4': {'format': 'ctranslate2'},
    "this run has no language 'fr'; known: de, en": {'languages': ['fr'], 'keep_experts': 0.5},
    "gate='top2' chooses among 2 experts or more; saw 1 of num_experts=4: keep a share of 0.5": {'keep_experts': 0.1},
    '--keep_experts is a share of the experts, above 0 and at most 1; saw 0': {'keep_experts': 0.0},
    'above 0 and at most 1; saw 1.5': {'keep_experts': 1.5},
    'add --keep_experts': {'languages': ['de']},
    'has no checkpoint of step 7': {'step': 7},
    'leave one of them out': {'format': 'ctranslate2', 'stablehlo_rows': 2},
  }
  for message, options in wrong.items():
    with pytest.raises(UserError, match=message):
      export.export(export.Options(**{'logdir': toy_run.path, 'out': out, **options}))
  with pytest.raises(UserError, match='there is no such directory'):
    export.export(export.Options(str(tmp_path / 'nowhere'), out=out))
  assert os.listdir(tmp_path) == []


def test_a_run_and_a_folder_are_arguments_or_flags():
  for words in ['run', 'out'], ['run', '--out=out'], ['out', '--logdir=run']:
    done = forks.run(['-m', 'lingvo_moe.cli.commands.main', 'export', *words], timeout=60)
    assert done.returncode == 1 and 'run: there is no such directory' in done.stderr
  for words in [], ['run'], ['run', 'out', 'more']:
    done = forks.run(['-m', 'lingvo_moe.cli.commands.main', 'export', *words], timeout=60)
    assert done.returncode == 1 and 'a run is exported to a new folder' in done.stderr


def log_probs(config, vocabs, weights, sources, targets) -> np.ndarray:
  """log p of each target, by the model's own definition."""
  program, found = config.program(), np.zeros(len(sources))
  config = dataclasses.replace(config, num_groups=1, eval_batch_tokens=config.max_length * len(sources))
  for index_B, batch in TextInput(config, vocabs, sources, targets=targets):
    found[index_B] = program.model.score(program.theta(weights), batch)
  return found


# CTranslate2


def dense(toy_run, **overrides):
  """(configuration of a dense model, its vocabularies, weights), not trained but at random in every weight."""
  config = toy_run.load_config()
  values = {'encoder_layers': 2, 'decoder_layers': 2, 'num_heads': 2, 'head_dim': 8, **overrides}
  config = dataclasses.replace(config, num_experts=0, beam_size=1, **values)
  rng = np.random.default_rng(0)
  specs = config.program().weight_specs
  weights = {name: rng.normal(1.0 if 'scale' in name else 0.0, 0.2, s.shape).astype('f') for name, s in specs.items()}
  return config, task_of(config).vocabs, weights


def test_a_ctranslate2_model_gives_the_same_log_probabilities(toy_run, tmp_path):
  ctranslate2 = pytest.importorskip('ctranslate2')
  from lingvo_moe.addons.export import ctranslate2_model

  config, vocabs, weights = dense(toy_run)
  ctranslate2_model.save(str(tmp_path), config, vocabs, weights)
  translator = ctranslate2.Translator(str(tmp_path), compute_type='float32')
  pieces = lambda vocab, lines: [vocab.pieces(ids) for ids in vocab.encode(lines)]
  sources, targets = zip(*toy.sentences(), strict=True)
  scored = translator.score_batch(pieces(vocabs[0], sources), pieces(vocabs[1], targets))
  expected = log_probs(config, vocabs, weights, sources, targets)
  np.testing.assert_allclose([sum(s.log_probs) for s in scored], expected, rtol=1e-5)
  assert (tmp_path / 'source.model').read_bytes() == vocabs[0].model_bytes


@pytest.mark.slow
def test_a_dense_run_is_decoded_equally_by_ctranslate2(tmp_path, monkeypatch):
  ctranslate2 = pytest.importorskip('ctranslate2')
  run = toy.make(tmp_path, num_experts=0)
  out = tmp_path / 'out'
  export.export(export.Options(run.path, out=str(out), format='ctranslate2'))
  source, target = task_of(run.load_config()).vocabs
  translator = ctranslate2.Translator(str(out), compute_type='float32')
  sources = [source.pieces(ids) for ids in source.encode(SENTENCES)]
  found = translator.translate_batch(sources, beam_size=4, length_penalty=0.8, patience=2)
  ids = [[target._processor.piece_to_id(piece) for piece in of_line.hypotheses[0]] for of_line in found]
  # The two searches rank unlike: what the run does not know by heart may differ.
  ours, theirs = lingvo_moe.load(run.path).translate(SENTENCES), target.detokenize(ids)
  known = [i for i, (_, text) in enumerate(toy.sentences()) if ours[i] == text]
  assert len(known) > 15 and [theirs[i] for i in known] == [ours[i] for i in known]
  run_examples('ctranslate2', out, monkeypatch)


# StableHLO


def test_encoder_and_step_as_stablehlo_give_the_log_probabilities_of_a_translation(toy_run, tmp_path):
  jax = pytest.importorskip('jax')
  from lingvo_moe.addons.export import stablehlo

  config = dataclasses.replace(toy_run.load_config(), beam_size=2, max_length=24)
  specs = {name: spec.shape for name, spec in config.program().weight_specs.items()}
  weights = {name: weight[...] for name, weight in toy_run.checkpoints().restore(toy.STEPS, specs).items()}
  stablehlo.save(str(tmp_path), task_of(config).exports.decoding_steps(2), weights)

  load = lambda name: jax.export.deserialize(bytearray((tmp_path / f'{name}.stablehlo').read_bytes())).call
  encode, step = jax.jit(load('encode')), jax.jit(load('decode_step'))
  assert {name: w.shape for name, w in np.load(tmp_path / 'weights.npz').items()} == specs
  shapes = json.loads((tmp_path / 'shapes.json').read_text())
  array = lambda of: np.zeros(of['shape'], of['dtype'])

  pairs = toy.sentences()[:2]
  source, target = task_of(config).vocabs
  batch = {name: array(of) for name, of in shapes['source'].items()}
  for row, ids in enumerate(source.encode([text for text, _ in pairs])):
    for name, values in ('src_ids', [*ids, 2]), ('src_segments', 1), ('src_positions', range(len(ids) + 1)):
      batch[name][row, : len(ids) + 1] = values
  targets = [[*ids, 2] for ids in target.encode([text for _, text in pairs])]
  inputs = {name: array(of) for name, of in shapes['inputs'].items()}
  inputs['src_segments'] = batch['src_segments']
  inputs['ids'][:] = 1
  cache, found = encode(weights, batch), np.zeros(2)
  for time in range(max(map(len, targets))):
    inputs['time'] = np.int32(time)
    for w in range(2):  # both hypotheses are the translation
      inputs['mask'][:, w, time * 2 + w] = 1
    logits, cache = step(weights, inputs, cache)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    for row, ids in enumerate(targets):
      if time < len(ids):
        np.testing.assert_allclose(log_p[row, 0], log_p[row, 1], atol=1e-4)
        found[row] += log_p[row, 1, ids[time]]
        inputs['ids'][row] = ids[time]
  expected = log_probs(config, (source, target), weights, *zip(*pairs, strict=True))
  np.testing.assert_allclose(found, expected, atol=1e-3)


def test_gates_that_need_all_experts_are_named():
  config = configuration.resolve('mt.cldr_gates.Hierarchical')
  with pytest.raises(UserError, match="with the gates top2, .*; this model has gate='hierarchical'"):
    config.with_share_of_experts(0.5)
  with pytest.raises(UserError, match='this model is dense'):
    configuration.resolve('mt.cldr.Dense').with_share_of_experts(0.5)
  smaller = configuration.resolve('mt.cldr.MoE8E').with_share_of_experts(0.3)
  assert smaller.num_experts == 3


# docs/export.md


def examples(module: str) -> str:
  """The session of the document in which a module is imported."""
  text = (pathlib.Path(__file__).parent.parent / 'docs' / 'export.md').read_text(encoding='utf-8')
  blocks = re.findall(r'^```pycon\n(.*?)^```$', text, flags=re.DOTALL | re.MULTILINE)
  (block,) = [block for block in blocks if f'import {module}' in block]
  return block


def run_examples(module: str, model: pathlib.Path, monkeypatch) -> None:
  """Runs the session in a folder in which OUT is the model."""
  (model.parent / 'OUT').symlink_to(model)
  monkeypatch.chdir(model.parent)
  test = doctest.DocTestParser().get_doctest(examples(module), {}, 'export.md', None, 0)
  assert len(test.examples) > 2 and doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.slow
def test_examples_of_the_document_run(toy_run, saved, monkeypatch):
  run_examples('tensorflow', saved, monkeypatch)
