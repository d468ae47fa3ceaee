"""The report in a real browser: values under the pointer, the scale, themes, widths, and no script."""

import re

import pytest
import written_run
from browser import Browser

from lingvo_moe.addons.report import page

LOSS = '#training figure'
TIP = f"document.querySelector('{LOSS} .tip')"


def reported(runs):
  """Address of a report on some runs."""
  return 'file://' + page.write([str(run) for run in runs], 'test', out=str(runs[0] / 'report.html'))[0]


@pytest.fixture(scope='module')
def of_one(tmp_path_factory):
  """Report on one run: training loss 7 / step at 20 steps, dev loss 0.6 and 0.3."""
  return reported([written_run.write_run(tmp_path_factory.mktemp('one') / 'run', steps=20)])


@pytest.fixture(scope='module')
def of_two(tmp_path_factory):
  """Report on a run in which points stand for several steps, and on one of fewer steps with an odd name."""
  folder = tmp_path_factory.mktemp('two')
  return reported([written_run.write_run(folder / name, steps=n) for name, n in (('mine', 200), ('<b>odd', 40))])


@pytest.fixture
def opened(tmp_path):
  with Browser(tmp_path / 'profile') as opened:
    yield opened
    assert not opened.errors


def centred(opened, selector):
  opened.js(f"document.querySelector('{selector}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
  return opened.box(selector)


def click(opened, selector):
  x, y, *_ = centred(opened, selector)
  for kind in 'mousePressed', 'mouseReleased':
    opened.point(x + 5, y + 5, kind, button='left', clickCount=1)


def pointed(opened, share, touch=False):
  """Text beside the pointer at a share of the width of the loss's axis, which begins at 52 and ends at 404 of 420."""
  left, top, width, height = centred(opened, f'{LOSS} > svg')
  x, y = left + width * (52 + share * 352) / 420, top + height / 2
  if touch:
    for kind, points in ('touchStart', [{'x': x, 'y': y}]), ('touchEnd', []):
      opened.call('Input.dispatchTouchEvent', type=kind, touchPoints=points)
  else:
    opened.point(x, y)
  return opened.js(f'{TIP}.hidden ? null : {TIP}.innerText')


def test_the_pointer_shows_the_values_of_all_curves(opened, of_one):
  opened.open(of_one)
  assert pointed(opened, 1) == 'step 20\ntraining: 0.35\ndev: 0.3'
  assert pointed(opened, 9 / 19) == 'step 10\ntraining: 0.7\ndev: 0.6'
  assert pointed(opened, 0) == 'step 1\ntraining: 7\ndev: 0.6 at 10'
  opened.point(1, 1)
  assert opened.js(f'{TIP}.hidden')


def test_curves_of_several_runs_are_over_one_another_with_their_names(opened, of_two):
  opened.open(of_two)
  said = pointed(opened, 1).split('\n')
  assert said[0] == 'step 200' and re.fullmatch(r'mine: training: 0\.035\d* \(0\.035 to 0\.0351\d\)', said[1])
  assert said[2] == 'mine: dev: 0.03' and said[3] == '<b>odd: training: 0.175 at 40' and len(said) == 5
  stroke = 'p => (s => s.stroke + s.strokeDasharray)(getComputedStyle(p))'
  strokes = opened.js(f"[...document.querySelector('{LOSS}').querySelectorAll('.lin .curve')].map({stroke})")
  assert len(strokes) == len(set(strokes)) == 4


def test_the_pointer_may_be_a_finger_or_keys(opened, of_one):
  opened.show(width=400)
  opened.open(of_one)
  assert pointed(opened, 1, touch=True).startswith('step 20')
  opened.js(f"document.querySelector('{LOSS} > svg').focus()")
  shown = []
  for key in ('Home', 'ArrowRight', 'End', 'ArrowRight', 'ArrowLeft'):
    opened.press(key)
    shown.append(opened.js(f'{TIP}.innerText').split('\n')[0])
  assert shown == ['step 1', 'step 2', 'step 20', 'step 20', 'step 19']
  assert opened.js(f"{TIP}.getAttribute('role')") == 'status'  # which a screen reader says
  opened.press('Escape')
  assert opened.js(f'{TIP}.hidden')


def test_curves_change_to_a_logarithmic_scale_and_back_and_so_does_the_pointer(opened, of_one):
  displays = f"[...document.querySelectorAll('{LOSS} > svg > g')].slice(0, 2).map(g => getComputedStyle(g).display)"

  def height():  # of the marker on the training curve at step 10
    assert pointed(opened, 9 / 19).startswith('step 10\ntraining: 0.7')
    path = opened.js(f"document.querySelector('{LOSS} > svg > g:last-child path.marks').getAttribute('d')")
    return float(path.split()[1].removesuffix('h0'))

  opened.open(of_one)
  linear = height()
  assert opened.js(displays) == ['inline', 'none']
  click(opened, f'{LOSS} .scale input')
  # From 0.3 at 204 units to 7 at 10: 0.7 is log(0.7 / 0.3) / log(7 / 0.3) of the way up.
  assert opened.js(displays) == ['none', 'inline'] and height() == pytest.approx(204 - 194 * 0.26896, abs=0.1)
  click(opened, f'{LOSS} .scale input')
  assert opened.js(displays) == ['inline', 'none'] and height() == linear
  assert linear == pytest.approx(204 - 194 * 0.4 / 6.7, abs=0.1)


@pytest.mark.parametrize('dark', [False, True])
@pytest.mark.parametrize('width', [400, 1280])
def test_the_page_fits_its_window_in_light_and_dark(opened, of_two, width, dark):
  opened.show(width=width, dark=dark)
  opened.open(of_two)
  for share in (0.02, 0.5, 1):
    pointed(opened, share)
    left, _, wide, _ = opened.box(f'{LOSS} .tip')
    assert left >= 0 and left + wide <= width
  assert opened.js('document.documentElement.scrollWidth') <= width
  colours = opened.js('(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))')
  text, ground = (sum(map(int, re.findall(r'\d+', colour)[:3])) for colour in colours)
  assert (text > ground) == dark and abs(text - ground) > 500


def test_without_scripts_the_curves_their_scale_and_tables_are_there(of_one, tmp_path):
  with Browser(tmp_path / 'profile', javascript=False) as opened:
    opened.open(of_one)
    opened.call('Emulation.setScriptExecutionDisabled', value=False)  # for the test; the page's own did not run
    assert opened.js("document.querySelectorAll('.tip').length") == 0
    assert opened.box(f'{LOSS} > svg > g.lin')[3] > 50
    click(opened, f'{LOSS} .scale input')
    assert opened.box(f'{LOSS} > svg > g.log')[3] > 50 and opened.box(f'{LOSS} > svg > g.lin')[3] == 0
    assert opened.js(f"document.querySelectorAll('{LOSS} table tr').length") > 20


def test_a_script_that_is_not_the_pages_own_does_not_run(of_one, tmp_path):
  with open(of_one.removeprefix('file://'), encoding='utf-8') as f:
    text = f.read().replace('</main>', '<script>window.ran = 1</script></main>')
  (tmp_path / 'a.html').write_text(text, encoding='utf-8')
  with Browser(tmp_path / 'profile') as opened:
    opened.open(f'file://{tmp_path}/a.html')
    assert opened.js('window.ran ?? 0') == 0
    assert any('Content Security Policy' in str(error) for error in opened.errors)
