"""Identification of languages: scripts, members of macrolanguages and variants that are not told apart."""

import pytest

from lingvo_moe.corpora import language_id

SIMPLIFIED, TRADITIONAL = (
  '我们今天去公园散步，天气很好，后来我们又去吃饭。',
  '我們今天去公園散步，天氣很好，後來我們又去吃飯。',
)
BOKMAL, NYNORSK = (
  'Jeg vil gjerne ha en kopp kaffe, takk for hjelpen.',
  'Eg vil gjerne ha ein kopp kaffi, takk for hjelpa.',
)
TAGALOG, PORTUGUESE = (
  'Ang aso ay tumatakbo nang mabilis sa parke.',
  'O cachorro está correndo rápido no parque da cidade.',
)
SERBIAN, SERBIAN_LATIN = 'Ово је пас који брзо трчи у парку.', 'Ovo je pas koji brzo trči u parku.'
PUNJABI, JAPANESE = 'میرا ناں گرپریت اے تے میں پنجاب توں آں', 'これは日本語で書かれた文章です。'
KAZAKH, HINDI_LATIN = (
  'Men kitap oqyp otyrmyn zhane mektepke baramyn',
  'mera naam ram hai aur main dilli mein rehta hoon',
)
AZERBAIJANI, HINDI = 'Бу китаб чох марағлыдыр вә мән ону охуйурам', 'मेरा नाम राम है और मैं दिल्ली में रहता हूँ'
GERMAN, ENGLISH = 'Das ist ein Satz mit vielen deutschen Wörtern.', 'This is a sentence of many English words.'


@pytest.mark.parametrize(
  'text, codes, expected',
  [
    (SIMPLIFIED, ['zho_Hans', 'zho_Hant', 'jpn_Jpan'], ['zho_Hans']),
    (TRADITIONAL, ['zho_Hans', 'zho_Hant', 'jpn_Jpan'], ['zho_Hant']),
    (TRADITIONAL, ['zh-CN', 'zh-TW'], ['zh-TW']),
    (SIMPLIFIED, ['zh', 'zh-Hant'], ['zh']),
    (JAPANESE, ['zho_Hans', 'jpn_Jpan'], ['jpn_Jpan']),
    (SERBIAN, ['srp_Latn', 'srp_Cyrl', 'bul_Cyrl'], ['srp_Cyrl']),
    (SERBIAN_LATIN, ['srp_Latn', 'srp_Cyrl'], ['srp_Latn']),
    (PUNJABI, ['pan_Guru', 'pan_Arab', 'eng_Latn'], ['pan_Arab']),
    (BOKMAL, ['nb', 'da', 'en'], ['nb']),
    (BOKMAL, ['nob_Latn', 'nno_Latn', 'dan_Latn'], ['nob_Latn']),
    (NYNORSK, ['nb', 'nn', 'da'], ['nn']),
    (NYNORSK, ['no', 'da'], ['no']),  # a member counts as its macrolanguage
    (TAGALOG, ['tl', 'en'], ['tl']),
    (TAGALOG, ['fil_Latn', 'en'], ['fil_Latn']),
    (PORTUGUESE, ['pt_PT', 'pt_BR', 'es'], ['pt_BR', 'pt_PT']),  # not told apart: both, the usual one first
    ('ދިވެހި ބަސް', ['div_Thaa', 'en'], ['div_Thaa']),  # known by its script alone
  ],
)
def test_the_likeliest_language_is_that_of_its_script_and_macrolanguage(text, codes, expected):
  """Kind: codes of which py3langid has another, or one for several."""
  (best, p), *others = language_id.rank(text, codes)
  assert [best, *(code for code, other in others if other == p)] == expected and p > 0.5


def test_a_long_text_in_a_language_that_a_model_does_not_have_has_one_all_the_same():
  found = dict(language_id.rank(ENGLISH * 200, ['de', 'fr']))
  assert sum(found.values()) == pytest.approx(1, abs=1e-5) and max(found.values()) > 0.5
  assert language_id.rank(GERMAN, [])[0][0] == language_id.rank(GERMAN, ['xx'])[0][0] == 'de'
  assert len({*dict(language_id.rank('12', ['de', 'en'])).values()}) == 1


@pytest.mark.parametrize(
  'code, right, wrong, untold',
  [
    ('pa-Arab', PUNJABI, ENGLISH, 'by its script alone'),
    ('kk-Latn', KAZAKH, AZERBAIJANI, 'by its script alone'),
    ('az-Cyrl', AZERBAIJANI, ENGLISH, 'by its script alone'),
    ('hi-Latn', HINDI_LATIN, HINDI, 'by its script alone'),
    ('pt-BR', PORTUGUESE, GERMAN, 'told as pt'),
    ('zh-TW', TRADITIONAL, SIMPLIFIED, ''),
    ('zho_Hans', SIMPLIFIED, TRADITIONAL, ''),
    ('sr-Latn', SERBIAN_LATIN, SERBIAN, 'by its script alone'),
    ('nob_Latn', BOKMAL, GERMAN, ''),
    ('tgl', TAGALOG, GERMAN, ''),
  ],
)
def test_a_line_is_in_another_language_by_its_script_or_as_far_as_its_variant_is_known(code, right, wrong, untold):
  is_other = language_id.OtherLanguage(code)
  assert not is_other(right) and is_other(wrong)
  assert untold in is_other.untold and bool(untold) == bool(is_other.untold)


@pytest.mark.parametrize('code, texts', [('zh', [SIMPLIFIED, TRADITIONAL]), ('sr', [SERBIAN, SERBIAN_LATIN])])
def test_a_code_that_says_no_script_has_them_all(code, texts):
  assert not any(map(language_id.OtherLanguage(code), texts)) and language_id.script(code) is None


def test_scripts_are_those_that_a_code_says_itself_or_by_its_region():
  codes = ['zh-TW', 'zh_HK', 'zh-CN', 'zho_Hant', 'pa-PK', 'kk-Latn', 'srp', 'pt-BR', 'de']
  expected = ['Hant', 'Hant', 'Hans', 'Hant', 'Arab', 'Latn', None, None, None]
  assert list(map(language_id.script, codes)) == expected
