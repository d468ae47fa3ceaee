"""The engine gives what the run gives, without TensorFlow; lines do not depend on each other."""

import dataclasses
import doctest
import functools
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

import language_models
import numpy as np
import pytest
import tensorflow as tf
import tiny_config
import toy_run as toy
from ai_edge_litert.interpreter import Interpreter
from random_theta import theta_of
from shared_traces import untraced

import lingvo_moe
from lingvo_moe import decoder, serve, translate
from lingvo_moe.addons.engine import exported, exported_translator, manifest, numpy_beam, search, stages
from lingvo_moe.addons.engine.graph import available_threads
from lingvo_moe.addons.engine.lanes import Lanes
from lingvo_moe.addons.engine.numpy_beam import BeamValues
from lingvo_moe.addons.export import engine_graphs, litert_export, mt_graphs
from lingvo_moe.cli.commands import export
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.models.export_forms import EngineParts
from lingvo_moe.ops import backend, litert
from lingvo_moe.run import results as results_lib
from lingvo_moe.search import beam
from lingvo_moe.search.length_norm import LengthNorm
from lingvo_moe.storage import files as files_lib
from lingvo_moe.storage import json_files
from lingvo_moe.tasks import inference
from lingvo_moe.text import translator

pytestmark = pytest.mark.filterwarnings('ignore:.* over max_length=32 tokens')

SENTENCES = [source for source, _ in toy.sentences()]
LINES = [*SENTENCES[:3], '', 'Eine Katze\ufeff singt\x00.', '   ', '日本', 'Hund ' * 60, *SENTENCES[12:15]]


def lines_of(count):
  rng = random.Random(0)
  return [' '.join(rng.choices(SENTENCES, k=rng.randint(1, 3))) for _ in range(count)]


@pytest.fixture(scope='module')
def tiny_export(tmp_path_factory):
  """Function of a type of weights and of fields: folder and configuration of the export of a small model, made once."""

  @functools.cache
  def make(kind, **fields):
    folder, config = tmp_path_factory.mktemp('tiny'), tiny_config.make(**fields).for_inference()
    program = config.program()
    weights = {name: value.numpy() for name, value in weights_lib.flatten(theta_of(program.model, 4, 0.5)).items()}
    litert_export.save(str(folder), program, EngineParts(mt_graphs.make(config), {}, {}), weights, {}, kind)
    return folder, config

  return make


@pytest.fixture(scope='module', params=['float32', 'int8'])
def model(request, toy_export):
  return lingvo_moe.load(str(toy_export(request.param)), split_sentences='never')


@pytest.fixture(scope='module')
def exact(toy_export):
  return lingvo_moe.load(str(toy_export('float32')), split_sentences='never')


@pytest.fixture(scope='module')
def run(toy_run):
  return lingvo_moe.load(toy_run.path, split_sentences='never')


def test_weights_are_chosen_for_litert_alone(toy_run):
  with pytest.raises(UserError, match='--weights is for --format=litert; saw --format=saved_model'):
    export.Options(toy_run.path, out='x', weights='int8')


def test_the_manifest_says_what_the_export_is(toy_run, toy_export, exact):
  about = json.loads((toy_export('float32') / 'manifest.json').read_text())
  assert (about['model'], about['step'], about['weights']) == (toy.MODEL, toy.STEPS, 'float32')
  assert about['version'] == manifest.VERSION
  others = {'manifest.json', 'README.md'}
  assert sorted(about['files']) == sorted({p.name for p in toy_export('float32').iterdir()} - others)
  assert (exact.model, exact.step, exact.pairs()) == (toy.MODEL, toy.STEPS, [('de', 'en')])
  assert (toy_export('float32') / 'requirements.txt').read_text().splitlines() == list(manifest.REQUIREMENTS)


def test_paragraphs_are_translated_by_sentence_as_by_the_run(run, exact, toy_export, monkeypatch):
  assert json.loads((toy_export('float32') / 'manifest.json').read_text())['several_sentences'] == 0.0
  assert exact.training_lines == run.training_lines
  text = f'{SENTENCES[0]}  {SENTENCES[3]}\n\n{SENTENCES[1]}'
  alone = exact.translate([SENTENCES[i] for i in (0, 3, 1)])
  cut = []
  for model in (run, exact):
    monkeypatch.setattr(model, 'split_sentences', 'auto')
    assert model.translate([text], n_best=4)[0][0] == '{}  {}\n\n{}'.format(*alone)
    with pytest.warns(UserWarning, match='sentence 0 has a sentence over max_length=32 tokens, which was cut'):
      cut.append(model.translate(['Hund ' * 60]))
  assert cut[0] == cut[1]


def assert_same(found, expected, tolerance):
  for ours, theirs in zip(found, expected, strict=True):
    assert [h.text for h in ours] == [h.text for h in theirs]
    numbers = lambda hypotheses: [(h.score, h.log_prob) for h in hypotheses]
    np.testing.assert_allclose(numbers(ours), numbers(theirs), atol=tolerance)


def test_float32_gives_the_symbols_and_scores_of_the_run(run, exact):
  for n_best in (1, 4):
    lines = LINES + lines_of(80)
    found, expected = (m.translate(lines, n_best=n_best, scores=True) for m in (exact, run))
    assert_same(found, expected, 2e-5)
  assert len({h.text for (h,) in exact.translate(lines, n_best=1, scores=True)}) > 20


OF_REQUESTS = (
  {'early_stopping': 'first', 'length_norm_alpha': 0.0},
  {'decode_ratio': 0.5, 'decode_extra': 1, 'beam_size': 3, 'early_stopping': 'heuristic'},
  *(
    pytest.param(values, marks=pytest.mark.slow)
    for values in (
      {'early_stopping': 'heuristic'},
      {'beam_size': 2},
      {'beam_size': 1},
      {'repetition_penalty': 1.5, 'search': 'greedy'},
    )
  ),
)


@pytest.mark.parametrize('values', OF_REQUESTS, ids=lambda values: '-'.join(map(str, values.values())))
def test_values_of_a_search_are_those_of_a_run_that_is_loaded_with_them(exact, toy_export, toy_run, values):
  lines = [*LINES, *lines_of(5)]
  with untraced():
    expected = lingvo_moe.load(toy_run.path, split_sentences='never', **values).translate(lines, n_best=1, scores=True)
  assert_same(exact.translate(lines, n_best=1, scores=True, **values), expected, 2e-5)
  loaded = lingvo_moe.load(str(toy_export('float32')), split_sentences='never', **values)
  assert loaded.translate(lines) == [h.text for (h,) in expected]


def test_greedy_search_is_that_of_the_run_and_of_a_beam_of_one_that_ends_with_the_first(run, exact, monkeypatch):
  lines = [*LINES, *lines_of(40)]
  greedy = exact.translate(lines, n_best=1, scores=True, search='greedy')
  assert_same(greedy, run.translate(lines, n_best=1, scores=True, search='greedy'), 2e-5)
  assert [h.text for (h,) in greedy] != exact.translate(lines)
  with pytest.raises(UserError, match='a beam of 1 has no 2 hypotheses'):
    exact.translate(lines, n_best=2, search='greedy')
  with pytest.raises(UserError, match='beam_size is for beam search; saw it with search=greedy'):
    exact.translate(lines, search='greedy', beam_size=2)
  monkeypatch.setattr(BeamValues, 'is_greedy', False)
  assert_same(exact.translate(lines, n_best=1, scores=True, beam_size=1, early_stopping='first'), greedy, 2e-5)


def test_a_log_directory_has_values_of_a_beam_when_it_is_loaded(run):
  with pytest.raises(UserError, match='beam_size cannot be asked here, as a log directory has it when it is loaded'):
    run.translate(SENTENCES[:1], beam_size=2)


def test_an_export_keeps_placeholders_from_its_model_as_the_run_does(run, exact):
  text = SENTENCES[0]
  lines = [f'{{{{x}}}} {text}', text, '%s', f'{text} https://a.org/x']
  for model in (run, exact):
    [plain, *_] = model.translate([text])
    found = model.translate(lines, n_best=1)
    assert found == [[f'{{{{x}}}} {plain}'], [plain], ['%s'], [f'{plain} https://a.org/x']]
  assert exact.translate(lines, placeholders=False) == run.translate(lines, placeholders=False)


SEARCHES = (
  {'search': 'sample', 'sample_temperature': 2.0, 'sample_seed': 5},
  {'search': 'sample', 'sample_temperature': 3.0, 'top_k': 4},
  {'search': 'sample', 'sample_temperature': 3.0, 'top_p': 0.5},
  {'search': 'mbr', 'sample_temperature': 2.0},
)


@pytest.mark.parametrize('values', SEARCHES, ids=['sample', 'top_k', 'top_p', 'mbr'])
def test_samples_are_those_of_the_run(run, exact, toy_export, toy_run, values):
  lines = [*LINES, *lines_of(5)]
  load = lambda path: lingvo_moe.load(path, split_sentences='never', **values)
  n_best = 6 if values['search'] == 'sample' else 2
  expected = run.translate(lines, n_best=n_best, scores=True, **values)
  assert_same(exact.translate(lines, n_best=n_best, scores=True, **values), expected, 1e-4)
  assert len({h.text for found in expected for h in found}) > 20
  texts = [[h.text for h in found] for found in expected[:4]]
  loaded = load(toy_export('float32'))
  assert loaded.translate(lines[:4], n_best=n_best) == texts  # the values of a model
  if 'top_p' in values:
    with untraced():
      assert load(toy_run.path).translate(lines[:4], n_best=n_best) == texts
  if values['search'] == 'mbr':
    assert loaded.translate(lines[:2], search='beam') == run.translate(lines[:2])


@pytest.fixture(scope='module')
def greedy(toy_run):
  """Greedy translations of the sentences by the run."""
  with untraced():
    return lingvo_moe.load(toy_run.path, split_sentences='never', beam_size=1).translate(SENTENCES)


@pytest.mark.parametrize('number', [0, 1])
def test_a_sample_depends_on_its_source_and_its_seed_alone(run, exact, greedy, number):
  model, values = (run, exact)[number], SEARCHES[0]
  alone = [model.translate([line], n_best=6, **values)[0] for line in SENTENCES[:2]]
  assert model.translate([*SENTENCES[5:9], *SENTENCES[:2]], n_best=6, **values)[4:] == alone
  assert model.translate(SENTENCES[:2], n_best=6, **{**values, 'sample_seed': 6}) != alone
  for best in ({'sample_temperature': 0}, {'top_k': 1, 'sample_temperature': 2.5}):
    assert model.translate(SENTENCES, n_best=6, search='sample', **best) == [[text] * 6 for text in greedy]


def test_samples_of_a_paragraph_are_joined_by_their_numbers(run, exact, monkeypatch):
  for model in (run, exact):
    sentences = [model.translate([line], n_best=6, **SEARCHES[0])[0] for line in SENTENCES[:2]]
    monkeypatch.setattr(model, 'split_sentences', 'always')
    found = model.translate([' '.join(SENTENCES[:2])], n_best=6, **SEARCHES[0])
    assert found == [[f'{a} {b}'.strip(' ') for a, b in zip(*sentences)]]
    monkeypatch.undo()


def test_the_log_probability_of_a_sample_is_that_of_its_text(run):
  [found] = run.translate(SENTENCES[:1], n_best=6, scores=True, search='sample', top_k=2, sample_temperature=1.5)
  scored = run.score([(SENTENCES[0], h.text) for h in found])
  # A text may have been written by other pieces than those it is read by; all are counted together here.
  close = [abs(s.log_prob - h.log_prob) < 1e-3 for s, h in zip(scored, found)]
  assert sum(close) >= 3


def test_what_does_not_fit_samples_is_refused(run, exact):
  for model in (run, exact):
    for values, message in (
      ({'search': 'x'}, "search must be one of beam, greedy, sample, mbr; saw 'x'"),
      ({'top_k': 3}, 'beam search draws no samples; saw top_k'),
      ({'search': 'sample', 'top_p': 0}, 'top_p must be a number from'),
      ({'search': 'sample', 'prefix': 'A'}, 'prefix, ban and terms are for beam search; saw search=sample'),
      ({'search': 'mbr', 'sample_seed': 1.5}, 'sample_seed must be a whole number'),
      ({'searc': 'sample'}, 'closest: search'),
    ):
      with pytest.raises(UserError, match=message):
        model.translate(SENTENCES[:1], **values)
    with pytest.raises(UserError, match='at most as many; saw n_best=33'):
      model.translate(SENTENCES[:1], n_best=33, search='mbr')
  with pytest.raises(UserError, match='top_k must be a whole number'):
    lingvo_moe.load(exact.path, search='sample', top_k=-1)
  with pytest.raises(UserError, match='mbr_samples must be a whole number from 1 on; saw 0'):
    lingvo_moe.load(exact.path, mbr_samples=0)


def test_a_line_of_just_max_length_tokens_is_not_over_it(run, exact):
  texts = ['Hund' + 'a' * count for count in range(60)]
  lengths = [len(ids) + 1 for ids in exact.source.encode(texts)]
  assert {exact.max_length, exact.max_length + 1} <= {*lengths}
  over = [i for i, length in enumerate(lengths) if length > exact.max_length]
  assert over == exact.translator().too_long(texts) == run.translator().too_long(texts)


def test_references_are_scored_as_by_the_run(run, exact, model):
  pairs = [('Hund ' * 60, 'A dog is running.'), ('', ''), ('', 'A dog'), *toy.sentences(), ('Ein Hund', 'cat ' * 9)]
  expected = run.score(pairs)
  for m, tolerance in ((exact, 1e-4), (model, 1.0)):
    found = m.score(pairs)
    assert [s.tokens for s in found] == [s.tokens for s in expected]
    np.testing.assert_allclose([s.log_prob for s in found], [s.log_prob for s in expected], atol=tolerance)


def test_a_translation_depends_on_its_line_alone(model):
  lines = lines_of(60)
  together = model.translate(lines, n_best=4, scores=True)
  order = random.Random(1).sample(range(60), 60)
  shuffled = model.translate([lines[i] for i in order], n_best=4, scores=True)
  assert_same(shuffled, [together[i] for i in order], 2e-5)
  assert_same([model.translate([line], n_best=4, scores=True)[0] for line in lines[:20]], together[:20], 2e-5)


@pytest.mark.parametrize('job', ['search', 'score'])
def test_finished_rows_leave_the_batch_and_positions_that_no_hypothesis_uses_the_cache(model, monkeypatch, job):
  sizes, run = [], stages.StagedGraph.run

  def noted(graph):
    sizes.append(graph.sizes.get('mask'))
    run(graph)

  def on_a_lane(sentences, decoder, encoder):
    memory, lengths = search.encode(encoder, model.source.encode(sentences)), np.array([5, 5, 30], np.int32)
    if job == 'search':  # longer ones are always better
      search.search(decoder, memory, lengths, BeamValues(4, 1, LengthNorm(50.0), 'exact'))
    else:
      search.score(decoder, memory, [[7] * length for length in lengths])

  monkeypatch.setattr(stages.StagedGraph, 'run', noted)
  list(model.lanes.run(on_a_lane, [SENTENCES[:3]], model.graphs(4 if job == 'search' else 1)))
  rows, _, positions = np.transpose(sizes[1:])
  assert len(rows) == 30 and rows[0] == 3 and rows[10:].max() == 1
  assert positions.max() < 30 * 4 and len({*zip(rows, positions, strict=True)}) <= 4


def test_int8_translates_as_float32(toy_export, exact):
  rounded = lingvo_moe.load(str(toy_export('int8')))
  assert rounded.translate(SENTENCES) == exact.translate(SENTENCES)
  found, expected = rounded.score(toy.sentences()), exact.score(toy.sentences())
  assert sum(abs(ours.log_prob - theirs.log_prob) for ours, theirs in zip(found, expected)) < 0.01 * sum(
    score.tokens for score in expected
  )


def test_weights_are_int8_but_those_of_gates_and_norms(toy_export):
  kinds = {}
  for path in toy_export('int8').glob('decoder*.tflite'):
    interpreter = Interpreter(str(path))
    for subgraph in range(interpreter.num_subgraphs()):
      for tensor in interpreter.get_tensor_details(subgraph):
        kinds.setdefault(tuple(map(int, tensor['shape'])), set()).add(tensor['dtype'])
  assert kinds[32, 4] == {np.float32}  # the gate
  assert np.int8 in kinds[286, 32]  # the output softmax
  assert kinds[64, 32] == {np.int8}  # the experts
  assert kinds[32,] == {np.float32}


def test_rows_of_an_embedding_table_in_int8_have_scales_of_their_own(toy_export):
  def constants(weights):
    interpreter = Interpreter(str(toy_export(weights) / 'decoder.tflite'))
    interpreter.allocate_tensors()
    found = [d for d in interpreter.get_tensor_details() if list(d['shape']) in ([286, 32], [286, 1])]
    return [(d, interpreter.get_tensor(d['index'])) for d in found if 'ReadVariableOp' in d['name']]

  (exact_VM,) = [x for d, x in constants('float32') if x.shape[1] == 32]
  # The table of the output softmax has a scale of the converter for each row, and the one for lookups a single one.
  rounded = {(d['dtype'], x.shape[1], d['quantization'][0] > 0): (d, x) for d, x in constants('int8')}
  (_, scale_V1), (details, rows_VM) = rounded[np.float32, 1, False], rounded[np.int8, 32, True]
  errors_VM = np.abs(details['quantization'][0] * rows_VM * scale_V1 - exact_VM)
  assert np.all(errors_VM <= scale_V1 * (0.5 / 127 + 1e-6)) and scale_V1.max() > 1.2 * scale_V1.min()


DENSE = {'num_kv_heads': 1, 'num_experts': 0, 'decode_extra': 5, 'length_norm_alpha': 2.0}
WIDE = {'num_experts': 3, 'model_dim': 24, 'num_heads': 3}


@pytest.mark.parametrize('fields', [DENSE, WIDE])
def test_scores_in_int8_do_not_depend_on_other_lines_or_padding(fields, tiny_export):
  (folder, _), random_ids = tiny_export('int8', **fields), np.random.default_rng(0)
  lines = lambda: [random_ids.integers(4, 50, n).tolist() for n in random_ids.integers(1, 9, 24)]
  sources, targets = lines(), lines()

  def scores(batch, decoder, encoder):
    memory = search.encode(encoder, [sources[i] for i in batch])
    return search.score(decoder, memory, [targets[i] for i in batch])

  lanes, names = Lanes(str(folder), 2), ('single', 'encoder')
  of = lambda batches: {i: x for batch, scores_B in lanes.run(scores, batches, names) for i, x in zip(batch, scores_B)}
  together = of([list(range(24))])
  for batches in [[i] for i in range(24)], lanes.batches(list(map(len, sources)), 1000):
    found = of(batches)
    np.testing.assert_allclose([found[i] for i in range(24)], [together[i] for i in range(24)], rtol=1e-5)
  assert len(batches) == 2 and np.ptp(list(together.values())) > 1


@pytest.mark.parametrize('kind, tolerance', [('float32', 1e-4), ('int8', 0.2)])
def test_heads_that_share_keys_and_values_translate_as_in_tensorflow(kind, tolerance, tiny_export):
  folder, config = tiny_export(kind, **DENSE)
  model, random_ids = config.program().model, np.random.default_rng(0)
  decoder, encoder = (stages.load(str(folder), name, 1, None) for name in ('decoder', 'encoder'))
  assert decoder.shapes['memory_keys_0'][1] == decoder.shapes['cache_values_0'][1] == 1
  ids_BT = search.padded([[*random_ids.integers(4, 60, n).tolist(), 2] for n in (3, 7, 5, 1)])
  real_BT = (ids_BT != 0).astype(np.int32)
  batch = {'src_ids': ids_BT, 'src_segments': real_BT, 'src_positions': np.arange(8) * real_BT}
  run = lambda theta, batch: inference.search(model, theta, batch, config, 1)
  expected = language_models.on_backend('cpu', run, theta_of(model, 4, 0.5), batch)
  limits_B = config.answer_lengths(real_BT).numpy()
  values = BeamValues(config.beam_size, 1, LengthNorm(config.length_norm_alpha), 'exact')
  memory = lambda: search.encode(encoder, [row[row != 0].tolist() for row in ids_BT])
  translations = [expected.ids_BWT[b, 0, :n].tolist() for b, n in enumerate(expected.lengths_BW[:, 0])]
  assert len({*map(tuple, translations)}) > 2 and max(map(len, translations)) > 8
  scores_B = search.score(decoder, memory(), translations)
  np.testing.assert_allclose(scores_B, expected.log_probs_BW[:, 0], atol=tolerance)
  if kind == 'float32':
    found = search.search(decoder, memory(), limits_B, values)
    assert [found.ids_BWT[b, 0, :n].tolist() for b, n in enumerate(found.lengths_BW[:, 0])] == translations


def test_examples_of_the_document_run(toy_export, monkeypatch):
  text = (pathlib.Path(__file__).parents[3] / 'docs' / 'export.md').read_text(encoding='utf-8')
  (block,) = [b for b in re.findall(r'^```pycon\n(.*?)^```$', text, re.DOTALL | re.MULTILINE) if 'lingvo_moe' in b]
  monkeypatch.chdir(toy_export('int8').parent)
  test = doctest.DocTestParser().get_doctest(block.replace("'OUT'", "'int8'"), {}, 'export.md', None, 0)
  assert len(test.examples) > 4 and doctest.DocTestRunner().run(test).failed == 0


def test_the_script_of_the_document_translates_without_this_package(toy_export, exact, tmp_path):
  text = (pathlib.Path(__file__).parents[3] / 'docs' / 'export.md').read_text(encoding='utf-8')
  (script,) = re.findall(r'^```py\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)
  (tmp_path / 'translate_alone.py').write_text(script, encoding='utf-8')
  for name in ('lingvo_moe', 'tensorflow'):
    (tmp_path / f'{name}.py').write_text('raise ImportError')
  command = [sys.executable, str(tmp_path / 'translate_alone.py'), str(toy_export('float32'))]
  lines = LINES + lines_of(20)
  done = subprocess.run(command, input='\n'.join(lines) + '\n', capture_output=True, text=True)
  assert done.stdout.splitlines() == exact.translate(lines), done.stderr


DECODES = """
import sys
from lingvo_moe import decoder
path, data_dir, out, what = sys.argv[1:]
decoder.decode(decoder.Options(path, data_dir=data_dir, out=out, split='dev', score=what == 'score'))
assert 'tensorflow' not in sys.modules and 'jax' not in sys.modules
"""


@pytest.mark.parametrize('score', [True, False])
def test_an_export_is_evaluated_as_its_run_is(toy_run, toy_export, tmp_path, score):
  data_dir = toy_run.load()[1].data_dir
  decoder.decode(decoder.Options(toy_run.path, split='dev', once=True, out=str(tmp_path / 'run'), score=score))
  command = ['-c', DECODES, toy_export('float32'), data_dir, tmp_path / 'export', 'score' if score else 'translate']
  done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  of = lambda name, file: (tmp_path / name / f'step_{toy.STEPS}' / file).read_text(encoding='utf-8')
  if score:
    numbers = [list(map(float, of(name, 'de-en.scores').split())) for name in ('run', 'export')]
    np.testing.assert_allclose(*numbers, atol=1e-4)
    return
  assert of('export', 'de-en.hyp') == of('run', 'de-en.hyp') and of('export', 'de-en.ref') == of('run', 'de-en.ref')
  assert json.loads(of('export', 'scores.json'))['mean'] == json.loads(of('run', 'scores.json'))['mean']
  assert 'mean BLEU' in done.stdout


@pytest.fixture
def options(toy_run, toy_export, tmp_path):
  return decoder.Options(
    str(toy_export('int8')), data_dir=toy_run.load()[1].data_dir, split='dev', out=str(tmp_path / 'out')
  )


@pytest.fixture
def results(tmp_path):
  folder = tmp_path / 'out' / f'step_{toy.STEPS}'
  return lambda: {path.name: path.read_text(encoding='utf-8') for path in folder.iterdir()}


def test_a_decoder_of_an_export_that_was_interrupted_continues_to_the_same_files(options, results, monkeypatch, capsys):
  monkeypatch.setattr(results_lib, '_UNFINISHED_SECONDS', 0.0)
  decoder.decode(options)
  expected, read, reads = results(), translator.of_finite_probability, itertools.count(1)
  assert set(expected) == {'de-en.hyp', 'de-en.src', 'de-en.ref', 'scores.json'}

  def until_the_tenth(*args):
    if next(reads) == 10:
      raise KeyboardInterrupt
    return read(*args)

  monkeypatch.setattr(translator, 'of_finite_probability', until_the_tenth)
  with pytest.raises(KeyboardInterrupt):
    decoder.decode(dataclasses.replace(options, overwrite=True))
  assert set(results()) == {'scores.unfinished.jsonl'}
  decoder.decode(options)
  assert 'going on after 9 lines' in capsys.readouterr().err
  assert next(reads) == 10 + (24 - 9) + 1 and results() == expected
  monkeypatch.setattr(exported_translator.ExportedTranslator, 'translate', lambda *args: 1 / 0)
  decoder.decode(options)
  said = capsys.readouterr()
  assert 'was made with the same settings' in said.err and 'mean BLEU' in said.out


def test_results_of_other_settings_are_replaced_whole_with_overwrite_alone(options, results, tmp_path):
  decoder.decode(options)
  with pytest.raises(UserError, match='holds results made with length_norm_alpha=0.8, now 0.5: give --overwrite'):
    decoder.decode(dataclasses.replace(options, length_norm_alpha=0.5))
  shutil.copytree(os.path.join(options.data_dir, 'de-en'), tmp_path / 'corpus' / 'fr-en')
  (tmp_path / 'corpus' / 'fr-en' / 'dev.de').rename(tmp_path / 'corpus' / 'fr-en' / 'dev.fr')
  other = dataclasses.replace(options, data_dir=str(tmp_path / 'corpus'), pairs='fr-en', max_sentences=3)
  decoder.decode(dataclasses.replace(other, overwrite=True))
  assert set(results()) == {'fr-en.hyp', 'fr-en.src', 'fr-en.ref', 'scores.json'}


@pytest.mark.parametrize(
  'given, runtime_options, message',
  [
    ({'batch_tokens': 64}, {}, 'batch_tokens is for log directories; saw batch_tokens=64 for the export .*leave it'),
    ({'prompt': 'Ein'}, {}, 'prompt is for log directories'),
    ({'num_samples': 0}, {}, 'num_samples is for log directories'),
    ({'early_stopping': 'never'}, {}, "early_stopping must be 'exact' or 'heuristic' or 'first'; saw 'never'"),
    ({'max_new_tokens': 9}, {}, 'max_new_tokens is for log directories'),
    ({'ensemble': ['@last']}, {}, 'ensemble is for log directories'),
    ({'vocab_outside': True}, {}, 'vocab_outside is for log directories'),
    ({'best': True}, {}, 'best is for log directories'),
    ({'beam_size': 5}, {}, 'have 4 hypotheses at most; saw beam_size=5: export the run again with beam_size=5'),
    ({'overwrite': True}, {'backend': 'reference'}, 'runs on the CPU of one machine: leave runtime flags out'),
  ],
)
def test_the_decoder_refuses_before_it_translates(options, monkeypatch, given, runtime_options, message):
  monkeypatch.setattr(exported_translator.ExportedTranslator, 'translate', lambda *a: 1 / 0)
  with pytest.raises(UserError, match=message):
    decoder.decode(dataclasses.replace(options, **given), RuntimeOptions(**runtime_options))


@pytest.mark.parametrize('load, options', [(serve.load, serve.Options), (translate.load, translate.Options)])
def test_other_jobs_refuse_what_an_export_cannot_do(toy_export, load, options):
  arguments = (RuntimeOptions(),) if load is translate.load else ()
  for name, value in {'checkpoint': 'last', 'vocab_outside': True, 'max_new_tokens': 3, 'step': 7}.items():
    with pytest.raises(UserError, match=f'saw {name}={value!r} for .*leave it out'):
      load(options(str(toy_export('int8')), **{name: value}), *arguments)
  with pytest.raises(UserError, match='beam search draws no samples; saw top_k: leave it out'):
    load(options(str(toy_export('int8')), top_k=3), *arguments)


def test_the_library_takes_threads_and_refuses_a_backend(toy_export, monkeypatch):
  made, path = [], str(toy_export('int8'))
  monkeypatch.setattr(exported, 'Lanes', lambda path, threads, check: made.append(threads))
  for options in {}, {'set_threads': False}, {'threads': 3}, {'set_threads': False, 'threads': 2}:
    lingvo_moe.load(path, **options)
  assert made == [available_threads(), 1, 3, 2]
  for name, value in {'backend': 'reference', 'vocab_outside': True, 'threads': 0}.items():
    with pytest.raises(UserError, match=f'{name}={value!r}.*: leave it out'):
      lingvo_moe.load(path, **{name: value})


@pytest.mark.parametrize('gate', ['hierarchical', 'soft'])
def test_gates_that_the_engine_cannot_compute_are_refused_with_the_way_out(gate):
  config = tiny_config.make(num_experts=9, gate=gate, groups_of_experts=3 if gate == 'hierarchical' else 0, choices=2)
  with pytest.raises(UserError, match=f"this model has gate='{gate}': use --format=saved_model"):
    engine_graphs.require(config)


@pytest.mark.parametrize('gate', ['top2', 'top_k', 'top_k_unnormalised', 'switch', 'noisy_top_k', 'by_target'])
def test_gates_that_choose_single_experts_are_exported(gate):
  engine_graphs.require(tiny_config.make(num_experts=4, gate=gate))


def test_activations_are_float32_whatever_the_model_says():
  config = tiny_config.make(num_experts=4, activation_dtype='bfloat16')
  program, encoder = config.program(), mt_graphs.make(config)['encoder']
  is_of_experts = lambda name: program.weight_specs[name].dims.startswith('E')
  theta = program.theta({n: w[:1] if is_of_experts(n) else w for n, w in program.init()['weights'].items()})
  with backend.use(litert.without_experts([])):
    memory = (
      tf.function(encoder.function, autograph=False).get_concrete_function(theta, encoder.inputs).structured_outputs
    )
  assert {x.dtype for x in memory.values()} == {tf.float32}


@pytest.mark.parametrize('size', [64, 97, 286, 640])
def test_best_symbols_are_those_of_all_the_vocabulary_the_first_of_equal_ones_first(size):
  logits_BWV = np.random.default_rng(size).integers(-9, 9, [3, 2, size]).astype(np.float32)
  found = engine_graphs.ranked(tf.constant(logits_BWV), 11)
  logits_FV = logits_BWV.reshape(6, size)
  best_FJ, symbols_FJ = tf.math.top_k(logits_FV, 11)
  np.testing.assert_array_equal(found['best'], best_FJ)
  np.testing.assert_array_equal(found['symbols'], symbols_FJ)
  np.testing.assert_allclose(found['log_z'], tf.reduce_logsumexp(logits_FV, axis=-1), rtol=1e-6)
  np.testing.assert_array_equal(found['logits'], logits_FV)


@pytest.mark.parametrize('count', [1, 5, 97])
def test_the_likeliest_symbols_of_numpy_are_those_of_tensorflow_the_first_of_equal_ones_first(count):
  logits_BWV = np.random.default_rng(count).integers(-9, 9, [3, 2, 97]).astype(np.float32)
  np.testing.assert_array_equal(numpy_beam.likeliest(logits_BWV, count), tf.math.top_k(logits_BWV, count)[1])
  assert numpy_beam.likeliest(logits_BWV, 99).shape == (3, 2, 97)


@pytest.mark.parametrize('width', [2, 3, 4])
def test_the_graph_finds_the_continuations_that_numpy_finds(width):
  rng, rows = np.random.default_rng(width), 7
  logits_BWV = rng.normal(size=[rows, width, 90]).astype(np.float32).round(1)  # of which some are equal
  log_probs_BW = -rng.exponential(size=[rows, width]).astype(np.float32)
  log_probs_BW[1, 1:] = log_probs_BW[2, 0] = log_probs_BW[3] = -np.inf
  found = engine_graphs.ranked(tf.constant(logits_BWV), 2 * width + 3)
  continued = engine_graphs.continued(found, tf.constant(log_probs_BW))
  of_rows = lambda name: found[name].numpy().reshape(rows, width, -1)
  live = beam.Live(None, None, log_probs_BW, None)
  scores = of_rows('best'), of_rows('symbols'), logits_BWV[:, :, 2:3], of_rows('log_z')
  expected = beam.continuations(numpy_beam.ARRAYS, live, *scores, None, np.zeros(rows, bool), beam.Specials(0, 1, 2))
  is_one_BJ = expected.log_probs_BJ > -np.inf
  np.testing.assert_allclose(continued['next_log_probs'], expected.log_probs_BJ, rtol=1e-6)
  for name, values_BJ in ('symbols', expected.symbols_BJ), ('parents', expected.parents_BJ):
    assert (continued[f'next_{name}'].numpy() == values_BJ)[is_one_BJ].all()
  assert is_one_BJ[:3].all() and not is_one_BJ[3].any()


def damage(folder, name, change):
  path = folder / name
  contents = path.read_bytes()
  changed = change(contents)
  path.unlink() if changed is None else path.write_bytes(changed)


@pytest.mark.parametrize(
  'name, change, message',
  [
    ('decoder.tflite', lambda b: b[:-8] + b'\1' + b[-7:], r'decoder.tflite was changed since it was exported'),
    ('source.model', lambda b: None, r'source.model, which manifest.json names, is missing: copy the whole folder'),
    ('manifest.json', lambda b: re.sub(b'"version": .', b'"version": 9', b), 'it was changed since it was written'),
    ('manifest.json', lambda b: b'{', 'is not JSON'),
    ('manifest.json', lambda b: b'{"version": 1}', 'is not the manifest of an export'),
    (
      'manifest.json',
      lambda b: b'{"version": 9, "format": "lingvo_moe engine"}',
      f'has version 9, .* reads {manifest.VERSION}',
    ),
  ],
)
def test_a_damaged_export_is_refused_in_one_line(toy_export, tmp_path, name, change, message):
  shutil.copytree(toy_export('int8'), tmp_path / 'out')
  damage(tmp_path / 'out', name, change)
  with pytest.raises(UserError, match=message) as e:
    lingvo_moe.load(str(tmp_path / 'out'))
  assert '\n' not in str(e.value)


@pytest.fixture
def rewritten(toy_export, tmp_path):
  """Function that makes an export with other values in its manifest, None: no such value, and other files; its path."""
  numbers = itertools.count()

  def make(values, files=None, of='float32'):
    source, folder = toy_export(of), tmp_path / str(next(numbers))
    shutil.copytree(source, folder, copy_function=os.link)
    about = json_files.read(str(folder / 'manifest.json'))
    for name, other in (files or {}).items():
      (folder / name).unlink(missing_ok=True)
      about['files'].pop(name, None)
      if other:
        shutil.copy(other, folder / name)
        about['files'][name] = files_lib.sha256(str(folder / name))
    about = {name: value for name, value in {**about, **values}.items() if value is not MISSING}
    (folder / 'manifest.json').unlink()
    (folder / 'manifest.json').write_text(json_files.dump(about))
    return str(folder)

  return make


MISSING = object()


@pytest.mark.parametrize(
  'values, message',
  [
    ({'beam_size': 3}, 'decoder.tflite is of another export .it has no 3 hypotheses'),
    ({'max_length': MISSING}, "'max_length' must be an integer from 3 to 1000000; saw none"),
    ({'begin': 10**6}, 'begin and tags of .* must be symbols of its vocabularies; saw 1000000 of 2'),
    ({'tags': {'de': 10**6}}, 'begin and tags of .* must be symbols of its vocabularies'),
    ({'task': 'language'}, "'vocab' must be a string; saw none"),
  ],
)
def test_a_manifest_that_is_not_of_its_graphs_and_vocabularies_is_refused(rewritten, values, message):
  with pytest.raises(UserError, match=message):
    lingvo_moe.load(rewritten(values)).translate(SENTENCES[:1])


def test_a_decoder_of_another_vocabulary_is_refused(toy_export, monkeypatch):
  model = lingvo_moe.load(str(toy_export('float32')))
  monkeypatch.setattr(type(model), 'symbols', 5)
  for name, search_name in (('decoder', 'beam'), ('single', 'greedy')):
    with pytest.raises(UserError, match=rf'{name}.tflite is of another export \(it has no 5 symbols\)'):
      model.translate(SENTENCES[:1], search=search_name)


def test_graphs_of_another_export_are_refused_in_one_line(toy_export, tiny_export, rewritten):
  own, others = toy_export('float32'), [tiny_export('int8', **fields)[0] for fields in (DENSE, WIDE)]
  names = sorted(path.name for path in own.glob('*.tflite'))
  for name, other in itertools.product(names, [own, *others, None]):
    files = sorted(other.glob('*.tflite')) if other else [None]
    for file in files:
      if file == own / name:
        continue
      path = rewritten({}, {name: file and str(file)})
      if {name, file and file.name} == {'encoder_experts_0.tflite', 'decoder_experts_0.tflite'} and other == own:
        continue  # they take the same rows
      if (name, file) == ('encoder_experts_0.tflite', None):
        continue  # those of the decoder are used
      with pytest.raises(UserError) as e:
        lingvo_moe.load(path).translate(SENTENCES[:2], search='greedy' if name.startswith('single') else 'beam')
      assert '\n' not in str(e.value) and '.tflite' in str(e.value), (name, file, e)
      shutil.rmtree(path)


def test_what_an_export_has_fixed_cannot_be_chosen(toy_export):
  path = str(toy_export('int8'))
  with pytest.raises(UserError, match='have 4 hypotheses at most; saw beam_size=5'):
    lingvo_moe.load(path, beam_size=5)
  with pytest.raises(UserError, match='have 4 hypotheses at most; saw beam_size=5'):
    lingvo_moe.load(path).translate(SENTENCES[:1], beam_size=5)
  with pytest.raises(UserError, match='step=1 for .*: leave it out, or export the run again'):
    lingvo_moe.load(path, step=1)
  with pytest.raises(UserError, match='a beam of 4 has no 5 hypotheses'):
    lingvo_moe.load(path).translate(SENTENCES[:1], n_best=5)
