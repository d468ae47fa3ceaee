"""The report on a run: what it shows of a run that was written by hand, and what it says of what a run lacks."""

import base64
import hashlib
import html.parser
import json
import math
import re
import shutil
import subprocess
import sys

import pytest
from text_lines import write
from written_run import LAYERS, PAIRS, made, step_line, write_corpus, write_json, write_run

from lingvo_moe.addons.report import escaped_html, experts_section, figures, page, reading, series, svg
from lingvo_moe.core.errors import UserError

EVIL = '<script>alert("1")</script> & \'"><img src=x onerror=alert(1)>\x00\x1b\ud800'


class Nesting(html.parser.HTMLParser):
  """Finds tags that close out of order, and collects what there is."""

  MAY_STAY_OPEN = ('tr', 'td', 'th', 'li', 'thead', 'tbody')

  def __init__(self):
    super().__init__()
    self.open, self.seen, self.text = [], [], []

  def handle_starttag(self, tag, attrs):
    self.seen.append((tag, dict(attrs)))
    if tag not in ('meta', 'input') and tag not in self.MAY_STAY_OPEN:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.seen.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    assert self.open.pop() == tag, self.getpos()

  def handle_data(self, data):
    self.text.append(data)

  def all(self, tag):
    return [attrs for name, attrs in self.seen if name == tag]


def parsed(text):
  found = Nesting()
  found.feed(text)
  found.close()
  assert found.open == []
  return found


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  path = write_run(tmp_path_factory.mktemp('runs') / 'mine')
  write_corpus(path / 'corpus')
  environment = {'software': {'python': '3.11.7', 'commit': 'abc123'}, 'machine': {'cores': 2}}
  write(path / 'environment.jsonl', [json.dumps({'step': 0, 'time': '2026-01-01T00:00:00Z', **environment})])
  return path


# What is shown


def test_the_page_opens_offline_and_runs_its_own_script_alone(run):
  found = parsed(made(run))
  assert {tag for tag, _ in found.seen}.isdisjoint({'link', 'img', 'iframe', 'object', 'base', 'form'})
  addresses = [v for _, attrs in found.seen for k, v in attrs.items() if k in ('href', 'src', 'action', 'xlink:href')]
  assert addresses and all(address.startswith('#') for address in addresses)
  assert all(not key.startswith('on') for _, attrs in found.seen for key in attrs)
  assert 'url(' not in made(run) and '@import' not in made(run)
  (policy,) = [a['content'] for a in found.all('meta') if a.get('http-equiv') == 'Content-Security-Policy']
  assert "default-src 'none'" in policy and 'unsafe' not in policy
  for tag in 'script', 'style':
    (source,) = re.findall(f'<{tag}>(.*?)</{tag}>', made(run), flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}';" in policy  # it runs this one alone


def test_each_plot_has_a_caption_a_description_and_a_table_behind_it(run):
  text = made(run)
  figures = re.findall(r'<figure>.*?</figure>', text, flags=re.DOTALL)
  titles = [re.search(r'<strong>(.*?)</strong>', figure)[1] for figure in figures]
  assert titles[:2] == ['BLEU and chrF by language', 'Dev loss by part of the text']
  of_run = ['Loss', 'Loss over time', 'Pace', 'Input wait', 'Learning rate', 'Gradient norm', 'Objective']
  assert titles[2:9] == of_run
  of_layer = ['Load by expert', 'Choices without a slot', 'Entropy of the gate', 'Largest load', 'Dead experts']
  assert titles[9:] == 2 * [*of_layer, 'Languages and experts']
  for figure, title in zip(figures, titles):
    assert figure.startswith('<figure><figcaption>')
    assert re.search(r'<svg [^>]*role="img" aria-label="[^"]{20,}"', figure), title
    assert f'<details><summary>Table: {title}</summary><div class="scroll" tabindex="0" role="region"' in figure
    assert figure.count('<tr>') > 2 and '<th scope="col">' in figure and '<th scope="row">' in figure


def test_headings_go_down_one_by_one_and_sections_are_linked(run):
  found = parsed(made(run))
  levels = [int(tag[1]) for tag, _ in found.seen if re.fullmatch(r'h\d', tag)]
  assert levels[0] == 1 and levels.count(1) == 1
  assert all(after - before <= 1 for before, after in zip(levels, levels[1:]))
  ids = [attrs['id'] for _, attrs in found.seen if 'id' in attrs]
  assert len(set(ids)) == len(ids)
  assert {a['href'][1:] for a in found.all('a')} <= set(ids)
  assert found.all('html') == [{'lang': 'en'}] and {
    'name': 'viewport',
    'content': 'width=device-width, initial-scale=1',
  } in found.all('meta')


def test_languages_come_by_the_size_of_their_training_text(run):
  (dots,) = re.findall(r'aria-label="BLEU and chrF of .*?</svg>', made(run), flags=re.DOTALL)
  assert re.findall(r'>(\w\w-en)<', dots) == ['bb-en', 'cc-en', 'aa-en']
  (table,) = re.findall(r'aria-label="BLEU and chrF by language"><table>.*?</table>', made(run), flags=re.DOTALL)
  assert '<th scope="row">bb-en<td>240<td>31.0<td>51.0<td>3.0' in table  # 60 lines of 4 bytes


def test_an_average_has_no_losses_loads_or_time_of_the_run_that_it_is_of(run, tmp_path):
  parent, average = tmp_path / 'mine', tmp_path / 'mine_average'
  shutil.copytree(run, parent)
  (average / 'decode').mkdir(parents=True)
  shutil.copy(parent / 'config.json', average)
  shutil.copytree(parent / 'decode', average / 'decode', dirs_exist_ok=True)
  write_json(average / 'averaged.json', {'steps': [10, 20], 'of': '../mine'})
  write_json(average / 'finished.json', {'step': 20, 'reason': 'average'})
  text = made(average)
  facts = dict(re.findall(r'<tr><th scope="row">([^<]*)<td>([^<]*)', text.split('<h2')[2]))
  assert facts == {
    'model': 'mt.cldr.Tiny',
    'training': 'none: the average of steps 10, 20 of mine',
    'mean BLEU': '31.0 over 3 languages of test at step 20',
    'mean chrF': '51.0 over 3 languages of test at step 20',
  }
  assert 'mine_average is the average of steps 10, 20 of mine, and has no curves or dev loss of its own.' in text
  assert 'loads of its own experts were not counted' in text and 'abc123' in text  # trained where the run was
  (loss,) = re.findall('aria-label="Loss over step[^"]*"', made(average, parent))  # and hides none of its curves
  assert 'mine: training' in loss and 'average' not in loss


def test_time_of_training_is_without_evaluations(run):
  """190 tokens a step at 95 a second; each evaluation took 99 s, and one is of a step that was not logged."""
  (label,) = re.findall('aria-label="Loss over time over seconds of training. ([^"]*)"', made(run))
  assert re.fullmatch('training: 7 at 2, 0.35 at 40, .*; dev: 0.6 at 20, 0.3 at 40, .*', label)
  log = [{'source_tokens_so_far': n, 'tokens_per_second': pace} for n, pace in ((100, 50), (200, None), (300, 20))]
  assert reading._training_time([{}, *log, {}]) == [None, 2.0, 7.0, 12.0, 12.0]
  assert reading._training_time([{'seconds_so_far': 1.0, 'tokens_per_second': 5.0}]) == [None]


def test_equal_curves_of_two_runs_are_both_seen(run, tmp_path):
  shutil.copytree(run, tmp_path / 'other')
  rates = re.findall(r'aria-label="Learning rate .*?</svg>', made(run, tmp_path / 'other'), flags=re.DOTALL)
  strokes = r'<g class="(c\d)" data-name="[^"]*"><path class="curve (d\d)"'
  assert re.findall(strokes, rates[0]) == [('c0', 'd0'), ('c1', 'd1')]
  losses = re.findall(r'aria-label="Loss over step.*?</svg>', made(run, tmp_path / 'other'), flags=re.DOTALL)
  drawn = [('c0', 'd0'), ('c0', 'd1'), ('c1', 'd1'), ('c1', 'd2')]
  assert re.findall(strokes, losses[0]) == 2 * drawn  # over both scales


def test_one_is_no_plural(tmp_path):
  text = made(write_run(tmp_path / 'mine', steps=1, pairs=('aa-en',)))
  assert '30.0 over 1 language of test at step 1' in text and 'BLEU and chrF of 1 language,' in text
  assert '4 experts over 1 span of steps' in text


def test_sizes_that_the_run_recorded_come_before_those_of_the_corpus(run, tmp_path):
  write_run(tmp_path)
  examples = {'aa-en': 5, 'bb-en': 3, 'cc-en': 9}
  write(tmp_path / 'environment.jsonl', [json.dumps({'step': 0, 'examples': examples})])
  assert reading.read([str(tmp_path)], 'test')[0].sizes == (examples, 'examples')
  assert reading.read([str(run)], 'test', str(run / 'corpus'))[0].sizes[1] == 'bytes'


def test_drops_of_every_choice_are_drawn(run):
  assert made(run).count('choice 9 dropped: ') == 2


def test_a_heat_map_has_the_dead_expert_and_the_share_of_each_other(run):
  text = made(run)
  (map_, _) = re.findall(r'aria-label="Load by expert in .*?</svg>', text, flags=re.DOTALL)
  # Loads 0, 10, 20 and 30 of a mean of 15: none, 0.67, 1.33 and 2 fair shares, at each of 20 times.
  assert re.findall(r'class="(l\d)" d="M0 (\d)h20v1h-20z', map_) == [('l0', '0'), ('l3', '1'), ('l5', '2')]
  assert 'd="M0 2h20v1h-20zM0 3h20v1h-20z"' in map_
  assert 'expert 3 is the fullest with 2 times a fair share; dead experts: 0"' in map_
  assert text.count('<th scope="row">20<td>0.00<td>0.67<td>1.33<td>2.00') == 2
  (dead, _) = re.findall(r'aria-label="Dead experts over step\. dead: ([^"]*)"', text)
  assert dead.startswith('1 at 1, 1 at 20')


def test_languages_and_experts_are_a_heat_map_in_the_order_of_the_languages(run):
  (map_, _) = re.findall(r'aria-label="Languages and experts in .*?</svg>', made(run), flags=re.DOTALL)
  assert 'bb-en most by expert 1 (4 times a fair share)' in map_
  assert 'class="l6" d="M1 0h1v1h-1zM2 1h1v1h-1zM0 2h1v1h-1z"' in map_  # bb uses 1, cc 2 and aa 0


def test_samples_are_beside_source_and_reference_in_their_own_direction(run):
  text = made(run)
  assert '<td lang="bb" dir="auto">eno<td lang="en" dir="auto">one<td lang="en" dir="auto">= one' in text
  assert '<td lang="en" dir="auto">two' in text


def test_samples_of_two_runs_are_in_their_columns_where_one_has_a_pair_more(run, tmp_path):
  fewer, without_text = write_run(tmp_path / 'fewer', pairs=PAIRS[:1]), write_run(tmp_path / 'without_text')
  write_corpus(fewer / 'corpus', PAIRS[:1])
  for other, empty in ((run, 0), (without_text, 2)):
    text = made(fewer, other)
    (table,) = re.findall(r'<table>(?:(?!<table>).)*?<th[^>]*>reference.*?</table>', text, flags=re.DOTALL)
    head, *rows = re.findall(r'<tr>(.*?)(?=<tr>|</table>|</tbody>)', table, flags=re.DOTALL)
    assert {len(re.findall(r'<t[hd]', row)) for row in (head, *rows)} == {6}
    assert [row.count('<td><td>') for row in rows if 'bb-en' in row] == [empty // 2] * 2


def test_versions_commit_and_machine_are_those_of_the_last_start(run):
  text = made(run)
  assert '<th scope="row">software commit<td>abc123' in text and '<th scope="row">machine cores<td>2' in text


def test_two_runs_are_side_by_side_with_what_differs(run, tmp_path):
  other = write_run(tmp_path / 'other', steps=10, experts=8, learning_rate=0.5)
  text = made(run, other)
  (differs,) = re.findall(r'aria-label="What differs"><table>.*?</table>', text, flags=re.DOTALL)
  names = re.findall(r'<th scope="row">([^<]*)', differs)
  assert names == ['data_dir', 'num_experts', 'learning_rate']
  assert (
    '<th scope="row">num_experts<td>4<td>8' in differs and '<th scope="row">learning_rate<td>(none)<td>0.5' in differs
  )
  assert 'mine: training' in text and 'other: dev' in text
  assert (
    text.count('<strong>Load by expert, mine</strong>') == text.count('<strong>Load by expert, other</strong>') == 2
  )
  parsed(text)


def test_two_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
  one, two = write_run(tmp_path / 'a' / 'run'), write_run(tmp_path / 'b' / 'run')
  assert [r.name for r in reading.read([str(one), str(two)], 'test')] == [str(one), str(two)]


def test_a_run_keeps_its_colour_where_the_other_has_nothing(run, tmp_path):
  begun = tmp_path / 'begun'
  write_json(begun / 'config.json', {'model': 'mt.cldr.Tiny', 'values': {'num_experts': 4}})
  text = made(begun, run)
  for figure in re.findall(r'<figure>.*?</figure>', text, flags=re.DOTALL):
    assert set(re.findall(r'"(?:curve|marks|diamonds|band) (c\d)', figure)) <= {'c1'}
  assert 'mine: training' in text and 'mine: BLEU' in text and '<strong>Load by expert, mine</strong>' in text


def test_the_same_run_gives_the_same_bytes(run):
  assert made(run) == made(run)


def test_a_run_as_large_as_the_quickstart_stays_below_300_kb(tmp_path):
  pairs = [f'{chr(97 + i)}x-en' for i in range(16)]
  write_run(tmp_path, steps=1200, pairs=pairs, experts=8)
  assert 50_000 < len(made(tmp_path).encode()) < 300_000


def test_thousands_of_experts_share_rows_and_a_summary(tmp_path):
  write_run(tmp_path, steps=100, experts=2048)
  text = made(tmp_path)
  assert 'A row for each 16 experts' in text and '<th scope="col">median' in text
  assert len(text.encode()) < 500_000
  parsed(text)


# What is escaped


def test_a_ceiling_of_the_vocabulary_stands_beside_the_score(tmp_path):
  run = write_run(tmp_path / 'run', pairs=PAIRS[:2])
  assert 'at most' not in made(run)
  path = run / 'decode' / 'test' / 'step_20' / 'scores.json'
  scores = json.loads(path.read_text())
  scores['pairs'][PAIRS[0]] |= {'best_bleu': 78.64, 'best_chrf': 70.6}
  write_json(path, scores)
  found = parsed(made(run)).text
  at = found.index('BLEU at most')
  assert found[at + 1] == 'chrF at most' and '78.6' in found[at:] and '70.6' in found[at:]


def test_scores_on_other_text_are_not_subtracted(tmp_path):
  runs = [write_run(tmp_path / name, pairs=PAIRS[:2]) for name in ('one', 'two')]
  for number, run in enumerate(runs):
    path = run / 'decode' / 'test' / 'step_20' / 'scores.json'
    scores = json.loads(path.read_text())
    hashes = {f'{pair}.{side}': side for pair in PAIRS[:2] for side in ('src', 'ref')} | {
      f'{PAIRS[1]}.ref': str(number)
    }
    write_json(path, {**scores, 'hashes': hashes, 'texts': {PAIRS[0]: f'with the tag of {number}'}})
  found = made(*runs)
  assert f'Of different text, so not to be compared: {PAIRS[1]}.' in found and found.count('+0.0') == 1
  assert f'Not shown, as the runs translated different text: {PAIRS[1]}.' in found


def test_nothing_that_a_run_wrote_becomes_a_part_of_the_page(tmp_path):
  run = write_run(tmp_path / 'run', note=EVIL, pairs=PAIRS[:1])
  for name in ('train.jsonl', 'routing.jsonl', 'dev_routing.json', 'config.json'):
    text = (run / name).read_text()
    for safe in ('layer_01', 'aa-en', 'mt.cldr.Tiny'):
      text = text.replace(safe, json.dumps(EVIL)[1:-1])
    (run / name).write_text(text)
  hyp = run / 'decode' / 'test' / 'step_20' / 'aa-en.hyp'
  hyp.write_bytes((EVIL[:-1] + '\n').encode() * 3)
  write_json(run / 'environment.jsonl', {'step': 0, 'software': {EVIL: EVIL}})
  write_json(run / 'finished.json', {'step': EVIL, 'reason': EVIL})
  run = run.rename(tmp_path / EVIL[:8])
  found = parsed(made(run))
  assert len(found.all('script')) == 1 and not found.all('img')
  assert sum('alert("1")' in text for text in found.text) > 5
  assert not re.search('[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]', made(run))


def test_text_is_escaped_and_markup_is_not():
  assert (
    escaped_html.tag('td', '<b>', escaped_html.tag('i', '&'), title='"') == '<td title="&quot;">&lt;b&gt;<i>&amp;</i>'
  )
  assert escaped_html.escape('a\x00\ud800b') == 'a\ufffd\ufffdb'


def test_a_log_of_two_versions_shows_loss_and_objective_under_their_names(tmp_path):
  path = write_run(tmp_path / 'run', steps=2, layers=())
  old = step_line(1)  # which called the objective 'loss', and the loss 'xent'
  new = {'step': 2, 'objective': 6.0, 'loss': 3.0, 'objective/smoothed_cross_entropy': 5.0, 'objective/balance': 1.0}
  write(path / 'train.jsonl', map(json.dumps, [old, new]))
  text = made(path)
  (loss,) = re.findall('aria-label="Loss over step. ([^"]*)"', text)
  assert loss.startswith('training: 7 at 1, 3 at 2,')
  (objective,) = re.findall('aria-label="Objective over step. ([^"]*)"', text)
  assert objective.startswith('objective: 8 at 1, 6 at 2,')
  assert 'smoothed cross entropy: 5 at 2' in objective and 'balance: 1 at 2' in objective
  assert '<th scope="row">training loss<td>3' in text


# What is lacking


def test_a_run_of_an_earlier_version_says_what_it_lacks(tmp_path):
  write_run(tmp_path / 'old')
  (tmp_path / 'old' / 'routing.jsonl').unlink()
  (tmp_path / 'old' / 'dev_routing.json').unlink()
  text = made(tmp_path / 'old')
  for said in ('old has no routing.jsonl', 'old has no dev_routing.json', 'old has no environment.jsonl'):
    assert said in text
  assert 'Entropy of the gate' in text and 'Load by expert' not in text and 'Dead experts' not in text
  assert 'Sources and references are not shown. old: ' in text and 'an earlier version wrote none' in text
  assert '<th scope="row">aa-en<td>1<td lang="en" dir="auto">one' in text  # the translations are not


def test_a_run_without_decoding_says_so(tmp_path):
  shutil.rmtree(write_run(tmp_path / 'run') / 'decode')
  text = made(tmp_path / 'run')
  assert 'run has not been decoded' in text and 'run has no samples' in text and 'BLEU and chrF by' not in text


def test_a_dense_model_has_no_experts_to_show(tmp_path):
  text = made(write_run(tmp_path / 'run', layers=()))
  assert 'run is a dense model: it has no experts.' in text and 'routing.jsonl' not in text


def test_a_dense_run_beside_one_with_experts(run, tmp_path):
  text = made(run, write_run(tmp_path / 'dense', layers=()))
  assert 'dense is a dense model' in text and '<strong>Load by expert, mine</strong>' in text
  parsed(text)


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
  write_json(tmp_path / 'run' / 'config.json', {'model': 'mt.cldr.Tiny', 'values': {'num_experts': 4}})
  text = made(tmp_path / 'run')
  assert 'run has no training log' in text and 'no line of a training step yet' in text and '<figure>' not in text


def test_a_language_model_shows_perplexity_and_texts(tmp_path):
  path = write_run(tmp_path / 'run', model='lm.shakespeare.Tiny')
  decoded = path / 'decode' / 'test' / 'step_20'
  (decoded / 'scores.json').unlink()
  text = made(path)
  assert 'run is a language model and has no translations' in text
  of_file = {'tokens': 98, 'cross_entropy': 1.5, 'perplexity': 4.48, 'perplexity_per_word': 9.0, 'bits_per_byte': 2.0}
  write_json(decoded / 'perplexity.json', {'files': {'test': of_file}, 'all': of_file, 'samples': ['Go, <i>sir</i>.']})
  text = made(path)
  assert '<th scope="row">test<td>98<td>1.5<td>4.48<td>9<td>2' in text and 'Go, &lt;i&gt;sir&lt;/i&gt;.' in text


def test_losses_that_are_not_finite_are_gaps(tmp_path):
  path = write_run(tmp_path / 'run')
  lines = (path / 'train.jsonl').read_text().splitlines()
  lines[3] = lines[3].replace('"grad_norm": 1.0', '"grad_norm": NaN').replace('"loss": 2.0', '"loss": "much"')
  write(path / 'train.jsonl', lines)
  text = made(path)
  assert 'nan' not in text.lower() and 'much' not in text


@pytest.mark.parametrize('damage', ['{"step": 3, "lo', '[1, 2]', '{"loss": 1}', 'null', '\x00\x00'])
@pytest.mark.parametrize('name', ['train.jsonl', 'routing.jsonl', 'environment.jsonl'])
def test_a_damaged_line_is_named(tmp_path, name, damage):
  path = write_run(tmp_path / 'run')
  write(path / name, ['{"step": 1}', damage, '{"step": 3}'])
  with pytest.raises(UserError, match=rf'{name} is a JSON object with its step; line 2 is not .*restore'):
    made(path)


def test_a_last_line_that_is_being_written_is_no_damage(run, tmp_path):
  path = write_run(tmp_path / 'mine')
  whole = reading.read([str(path)], 'test')[0].log
  with open(path / 'train.jsonl', 'a') as f:
    f.write('{"step": 21, "lo')
  assert reading.read([str(path)], 'test')[0].log == whole


@pytest.mark.parametrize('name', ['config.json', 'dev_routing.json', 'finished.json'])
def test_files_that_are_no_json_are_named(tmp_path, name):
  path = write_run(tmp_path / 'run')
  (path / name).write_text('{"step"')
  with pytest.raises(UserError, match=f'{name} is not JSON'):
    made(path)


def test_routing_of_another_shape_is_left_out(tmp_path):
  path = write_run(tmp_path / 'run')
  write_json(path / 'dev_routing.json', {'step': 1, 'subsets': ['aa-en'], 'choices': {LAYERS[0]: [[1], [2]]}})
  write(
    path / 'routing.jsonl',
    ['{"step": 1, "choices": {"encoder/layer_01": ["x"]}}', '{"step": 2, "choices": {"encoder/layer_01": []}}'],
  )
  text = made(path)
  assert 'Load by expert' not in text and 'Languages and experts' not in text


# Parts


def test_a_thinned_series_has_means_of_equal_spans_and_their_extent():
  points = [(1, 4.0), (2, 2.0), (3, math.nan), (4, None), (5, 6.0), (6, 8.0), (7, True), (8, 'x'), (9, 1.0)]
  found = series.thinned(points, 2)
  assert found == ([2.0, 9.0], [3.0, 5.0], [2.0, 1.0], [4.0, 8.0]) and found.thinned
  assert series.thinned(points, 5) == ([1, 2, 5, 6, 9], *[[4.0, 2.0, 6.0, 8.0, 1.0]] * 3)
  assert series.thinned([], 3) == ([], [], [], [])


def test_chosen_are_evenly_spaced_with_the_last():
  assert series.chosen(3, 5) == [0, 1, 2] and series.chosen(10, 3) == [2, 5, 9] and series.chosen(0, 3) == []


def test_ticks_of_logarithms_are_powers_of_ten_with_2_and_5_times_these_where_few_are():
  assert series.log_ticks(0.01, 1e3) == pytest.approx([0.01, 0.1, 1, 10, 100, 1000])
  assert series.log_ticks(1.5, 60) == pytest.approx([2, 5, 10, 20, 50])
  assert series.log_ticks(2.5, 7) == series.ticks(2.5, 7)


@pytest.mark.parametrize(
  'low, high, expected',
  [
    (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    (3, 18, [5, 10, 15]),
    (-1e-3, 1e-3, [-1e-3, -5e-4, 0, 5e-4, 1e-3]),
    (0, 0.6, [0, 0.2, 0.4, 0.6]),
    (2, 2, [2]),
  ],
)
def test_ticks_are_round_and_inside(low, high, expected):
  assert series.ticks(low, high) == pytest.approx(expected, abs=1e-12)


def test_numbers_are_written_short():
  assert [series.text(x) for x in (0.123456, 3.0, 1234567.0, 12345.6, None)] == [
    '0.1235',
    '3',
    '1,234,567',
    '12,346',
    '',
  ]
  assert [series.tick_text(x) for x in (0.5, 12000.0, 3e6)] == ['0.5', '12k', '3M']


def test_levels_of_a_heat_map_are_multiples_of_a_fair_share():
  assert experts_section.fair_shares([0, 1, 2, 5]) == [0, 0.5, 1, 2.5] and experts_section.fair_shares([0, 0]) == [0, 0]
  assert [experts_section.level(s) for s in (0, 0.01, 0.25, 0.3, 1, 1.25, 1.3, 3, 4.5)] == [0, 1, 1, 2, 4, 4, 5, 6, 7]


@pytest.mark.parametrize('ys', [[0.0], [0.0, 0.0], [5.0, 5.0], [-1.0, 1e30], [1e-30, 2e-30]])
@pytest.mark.parametrize('from_zero', [False, True])
def test_any_curve_is_drawn_within_its_frame(ys, from_zero):
  xs = [float(i) for i in range(len(ys))]
  drawn = svg.curves([svg.Curve('a', series.Series(xs, ys, ys, ys))], 'x', 'label', from_zero)
  paths = re.findall(r'class="(?:curve|marks)[^"]*" d="([^"]*)"', drawn)
  assert len(paths) == (2 if 0 < 2 * min(ys) <= max(ys) else 1)  # over a logarithmic scale too
  for path in paths:
    numbers = [tuple(map(float, pair)) for pair in re.findall(r'(-?[\d.]+) (-?[\d.]+)', path)]
    assert len(numbers) == len(ys) and all(0 <= x <= 420 and 0 <= y <= 240 for x, y in numbers)


def test_curves_without_points_are_no_figure():
  assert figures.curves('Loss', [svg.Curve('a', series.Series([], [], [], []))], 'step') is None


# The command


def test_the_command_writes_the_file_and_says_so(run, tmp_path):
  out = tmp_path / 'a.html'
  command = [sys.executable, '-m', 'lingvo_moe.cli.commands.main', 'report']
  done = subprocess.run([*command, str(run), f'--out={out}'], capture_output=True, text=True)
  assert out.read_text() == page.page(reading.read([str(run)], 'test')) and done.stdout.startswith(f'{out}: ')
  for runs in [], [run] * 9:
    assert 'a report is of 1 to 8 runs' in subprocess.run([*command, *runs], capture_output=True, text=True).stderr


def test_a_report_is_written_into_its_run(tmp_path):
  page.write([str(write_run(tmp_path / 'run'))], 'test')
  assert (tmp_path / 'run' / 'report.html').exists() and not list(tmp_path.rglob('*.partial'))


def test_mistakes_are_answered(run, tmp_path):
  with pytest.raises(UserError, match='there is no run in'):
    page.write([str(tmp_path / 'nowhere')], 'test')
  with pytest.raises(UserError, match='is a directory'):
    page.write([str(run)], 'test', out=str(tmp_path))
  (tmp_path / 'mine.json').write_text('{}')
  with pytest.raises(UserError, match='replaces reports only; .*mine.json is another file'):
    page.write([str(run)], 'test', out=str(tmp_path / 'mine.json'))
  assert (tmp_path / 'mine.json').read_text() == '{}'


def test_text_of_a_folder_that_a_run_names_and_what_its_links_lead_to_are_not_shown(tmp_path):
  run = write_run(tmp_path / 'run', pairs=('aa-en',), data_dir=str(tmp_path / 'home'), split_files=[['test', 'X']])
  for language in ('aa', 'en'):
    write(tmp_path / 'home' / 'aa-en' / f'X.{language}', ['my secret'] * 3)
    write(tmp_path / 'home' / 'aa-en' / f'train.{language}', ['one'] * 3)
  assert 'my secret' not in (text := made(run)) and 'is not read: give the corpus that was decoded' in text
  assert not reading.read([str(run)], 'test')[0].sizes[0]
  told = reading.read([str(run)], 'test', str(tmp_path / 'home'))
  assert 'my secret' in page.page(told) and told[0].sizes[0]
  (decoded,) = (run / 'decode' / 'test').iterdir()
  (decoded / 'aa-en.hyp').unlink()
  (decoded / 'aa-en.hyp').symlink_to(tmp_path / 'home' / 'aa-en' / 'X.en')
  assert 'my secret' not in made(run)


def test_the_best_dev_loss_is_of_the_latest_dev_text(tmp_path):
  run = write_run(tmp_path / 'run', steps=1, layers=())
  lines = [
    {'step': 4, 'dev_loss': 2.0},  # of an earlier version
    {'step': 4, 'best_step': 4, 'dev_loss_of_best': 2.5, 'dev_text': 'all'},
    {'step': 8, 'dev_loss': 2.4, 'dev_text': 'all'},
  ]
  record = lambda: reading.read([str(run)], 'test')[0]
  for count, expected in ((1, (2.0, 4)), (2, (2.5, 4)), (3, (2.4, 8))):
    write(run / 'train.jsonl', map(json.dumps, lines[:count]))
    assert record().best == expected
  more = [{'step': 8, 'best_step': 8, 'dev_loss_of_best': 3.0, 'dev_text': 'few'}]
  write(run / 'train.jsonl', map(json.dumps, lines + more))
  assert record().best == (3.0, 8) and '3 at step 8' in made(run)
  more.append({'step': 12, 'dev_loss': 3.1, 'dev_text': 'few'})
  write(run / 'train.jsonl', map(json.dumps, lines + more))
  assert record().best == (3.0, 8) and [line['step'] for line in record().evaluations] == [4, 12]
