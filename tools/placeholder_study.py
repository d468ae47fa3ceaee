"""Placeholders that come back whole and once, of 1,000 interface strings, with a model that never saw any.

  python tools/placeholder_study.py RUN

Counts the strings of which every placeholder comes back. The strings are in five languages, 200 each, made here by
templates, and are translated as text (`placeholders=False`), with a word in the place of each placeholder, and by
default. RUN is a run or an export that reads German, French and Czech into English, and English into German and French
(`pairs=de-en,fr-en,cs-en,en-de,en-fr`).
"""

import collections
import functools
import time

from lingvo_moe.cli import app
from lingvo_moe.cli.options import OptionGroup, flag

KINDS = {
  '{{name}}': ['{{name}}', '{{user}}', '{{ count }}'],
  '%s': ['%s', '%d', '%@'],
  '%1$s': ['%1$s', '%2$d', '%3$s'],
  '{0}': ['{0}', '{1}', '{file}'],
  '$1': ['$1', '$2', '$3'],
  '${x}': ['${x}', '${user.name}', '${n}'],
  ':name': [':name', ':count', ':file'],
  '%(name)s': ['%(name)s', '%(count)d', '%(file)s'],
  'URL': ['https://example.org/help?id=7', 'www.example.com', 'http://example.net/a#b'],
  'e-mail': ['help@example.org', 'max.mustermann@mail.example.com', 'a+b@example.net'],
}
# X and Y are placeholders.
TEMPLATES = {
  ('de', 'en'): """Hallo X!|X Dateien wurden gelöscht.|Die Datei „X“ ist zu groß.|Willkommen, X|X von Y Bildern geladen
Ein Mann wartet auf X.|Bitte öffnen Sie X und warten Sie.|X: Bild nicht gefunden|Zwei Hunde spielen mit X im Schnee.
Möchten Sie X jetzt teilen?|Letzte Änderung von X am Y|Die Frau (X) trägt ein rotes Hemd.|Mehr dazu: X""",
  ('fr', 'en'): """Bonjour X !|X fichiers ont été supprimés.|Le fichier « X » est trop grand.|Bienvenue, X
X images sur Y sont ouvertes|Un homme attend X.|Ouvrez X et attendez, s'il vous plaît.|X : image introuvable
Deux chiens jouent avec X dans la neige.|Voulez-vous partager X maintenant ?|Modifié par X le Y
La femme (X) porte une chemise rouge.|Pour en savoir plus : X""",
  ('cs', 'en'): """Ahoj X!|Počet smazaných souborů: X|Soubor „X“ je příliš velký.|Vítejte, X|Načteno X z Y obrázků
Muž čeká na X.|Otevřete X a počkejte.|X: obrázek nenalezen|Dva psi si hrají s X ve sněhu.|Chcete nyní sdílet X?
Naposledy změnil X dne Y|Žena (X) má na sobě červenou košili.|Více informací: X""",
  ('en', 'de'): """Hello X!|X files were deleted.|The file "X" is too large.|Welcome, X|X of Y pictures loaded
A man is waiting for X.|Please open X and wait.|X: picture not found|Two dogs are playing with X in the snow.
Do you want to share X now?|Last changed by X on Y|The woman (X) is wearing a red shirt.|Learn more: X""",
  ('en', 'fr'): """Hi X!|X people like this picture.|The folder "X" is empty.|Good morning, X|Step X of Y
A child is looking at X.|Send X to a friend.|X: no answer|A boy throws X into the water.|Stop X?
Sent by X to Y|The man (X) is sitting on a bench.|Go to X""",
}
STAND_INS = 'XX', 'Anna', '7'


def strings(templates: str, count: int = 200):
  """(kind, text, placeholders) of so many strings, each template with each kind in turn."""
  forms = templates.replace('\n', '|').split('|')
  for i in range(count):
    form, kind = forms[i % len(forms)], list(KINDS)[i // len(forms) % len(KINDS)]
    first, second = (KINDS[kind][(i + k) % 3] for k in (0, 1))
    text = form.replace('X', '\0').replace('Y', '\1').replace('\0', first).replace('\1', second)
    yield kind, text, [first, second][: 1 + ('Y' in form)]


def whole(text: str, placeholders: list[str]) -> bool:
  """Whether each of some placeholders is in a text, once."""
  return all(text.count(placeholder) == 1 for placeholder in placeholders)


class Options(OptionGroup):
  """Options of the study."""

  path: str = flag(None, 'Log directory or export, unless it is an argument.')


@app.command(Options, tensorflow=False, takes=('path',), models=False)
def main(options: Options) -> None:
  import lingvo_moe

  model = lingvo_moe.load(options.path)
  columns = ('as text', 'stand-in', 'kept')
  by_language, by_kind = collections.defaultdict(collections.Counter), collections.defaultdict(collections.Counter)
  for (source, target), templates in TEMPLATES.items():
    made = list(strings(templates))
    texts = [text for _, text, _ in made]
    with_words = []
    for _, text, placeholders in made:
      for placeholder, word in zip(placeholders, STAND_INS):
        text = text.replace(placeholder, word)
      with_words.append(text)
    translate = functools.partial(model.translate, target=target, source=source)
    begin = time.perf_counter()
    found = {'as text': translate(texts, placeholders=False), 'stand-in': translate(with_words, placeholders=False)}
    middle = time.perf_counter()
    found['kept'] = translate(texts)
    seconds = time.perf_counter() - middle
    print(f'{source}-{target}: {(middle - begin) / 2:.1f} s without, {seconds:.1f} s with placeholders kept')
    for column in columns:
      for (kind, _, placeholders), translation in zip(made, found[column], strict=True):
        wanted = list(STAND_INS[: len(placeholders)]) if column == 'stand-in' else placeholders
        for counts in (by_language[f'{source}-{target}'], by_kind[kind]):
          counts[column] += whole(translation, wanted)
          counts[f'{column} of'] += 1
  for name, table in {'direction': by_language, 'kind': by_kind}.items():
    table['all'] = sum(table.values(), collections.Counter())
    print(f'\n| {name} | strings | {" | ".join(columns)} |\n|---|--:|--:|--:|--:|')
    for row, counts in table.items():
      shares = (f'{counts[column] / counts[f"{column} of"]:.1%}' for column in columns)
      print(f'| {row} | {counts["kept of"]} | {" | ".join(shares)} |')


if __name__ == '__main__':
  main()
