"""FLOPs by formula against sums worked out by hand. test_cost.py compares train steps with compiled programs."""

import dataclasses

from lingvo_moe.addons.analysis import flops
from lingvo_moe.config import registry

TINY = registry.get('mt.bench_s.Tiny')()  # M=32, H=64, 4 heads of 8, 2 + 2 layers, the second of each with 16 experts
TOKENS = 8 * 16  # of a side
NOTHING = {'cumsum': 0, 'dispatch/combine': 0, 'optimiser': 0, 'other': 0}

PROJECTION = 2 * TOKENS * 32 * 32
ATTENTION = 2 * 2 * TOKENS * 16 * 32
SLOTS = 4 * 16 * 4  # 4 groups of 32 tokens: 2 * 32 / 16 = 4 slots of each of 16 experts


def test_a_train_step():
  # Every product thrice. 6 attentions, 2 of them to the encoder; 2 dense layers, 2 with experts.
  assert flops.train_step(TINY) == NOTHING | {
    'attention': 6 * 3 * ATTENTION,
    'projections': 6 * 3 * 4 * PROJECTION,
    'feed-forward': 3 * 2 * (2 * 2 * TOKENS * 32 * 64),
    'experts': 3 * 2 * (2 * 2 * SLOTS * 32 * 64),
    'gating': 2 * 3 * (2 * TOKENS * 32 * 16),
    'softmax': 3 * (2 * TOKENS * 32 * 400),
  }


def test_dropless_every_visit_of_a_token_counts_whatever_a_round_holds():
  dropless = dataclasses.replace(TINY, capacity_factor=None, gate='top_k', choices=5, dispatch='einsum')
  found = flops.train_step(dropless)
  assert found['experts'] == 3 * 2 * (2 * 2 * 5 * TOKENS * 32 * 64)
  assert found['dispatch/combine'] == 2 * 5 * (2 * TOKENS * 3 * (16 * 4) * 32)  # three rounds of two choices
  switch = flops.train_step(dataclasses.replace(TINY, capacity_factor=None, gate='switch'))
  assert switch['experts'] == 3 * 2 * (2 * 2 * TOKENS * 32 * 64)


def test_micro_batches_balanced_over_the_batch_run_once_more_as_far_as_the_last_gate():
  group = dataclasses.replace(TINY, micro_batches=2, dispatch='einsum')
  plain, found = flops.train_step(group), flops.train_step(dataclasses.replace(group, balance_over='batch'))
  # The encoder, and the decoder but for the experts of its last layer, and the output softmax.
  more = {
    'attention': 6 * ATTENTION,
    'projections': 6 * 4 * PROJECTION,
    'feed-forward': 2 * (2 * 2 * TOKENS * 32 * 64),
    'experts': 2 * 2 * SLOTS * 32 * 64,
    'gating': 2 * (2 * TOKENS * 32 * 16),
    'dispatch/combine': 2 * (2 * TOKENS * (16 * 4) * 32),
  }
  assert found == plain | {part: plain[part] + made for part, made in more.items()}
  assert plain == flops.train_step(dataclasses.replace(TINY, dispatch='einsum'))
  in_encoder = dataclasses.replace(group, experts_in='encoder')
  plain, found = (flops.train_step(dataclasses.replace(in_encoder, balance_over=o)) for o in ('group', 'batch'))
  assert found['attention'] - plain['attention'] == 2 * ATTENTION and found['experts'] == plain['experts']
  deep = dataclasses.replace(group, encoder_layers=4, decoder_layers=4)  # four gates, three of them before the last
  plain, found = (flops.train_step(dataclasses.replace(deep, balance_over=over)) for over in ('group', 'batch'))
  assert found['attention'] - plain['attention'] == 12 * ATTENTION
  assert found['experts'] - plain['experts'] == 3 * 2 * 2 * SLOTS * 32 * 64
  assert found['gating'] - plain['gating'] == 4 * (2 * TOKENS * 32 * 16)


def test_masks_count_five_times_and_copies_do_not():
  einsum = flops.train_step(dataclasses.replace(TINY, dispatch='einsum'))
  assert einsum['dispatch/combine'] == 2 * 5 * (2 * TOKENS * (16 * 4) * 32)
  assert einsum == flops.train_step(TINY) | {'dispatch/combine': einsum['dispatch/combine']}


def test_what_is_rematerialised_counts_again_but_for_its_last_product():
  plain = flops.train_step(TINY)
  attention = flops.train_step(dataclasses.replace(TINY, remat='attention'))
  again = {'attention': 6 * ATTENTION, 'projections': 6 * 3 * PROJECTION}
  assert attention == plain | {part: plain[part] + flops for part, flops in again.items()}
  block = flops.train_step(dataclasses.replace(TINY, remat='block'))
  assert block['attention'] == 6 * 4 * ATTENTION and block['projections'] == 6 * 4 * 4 * PROJECTION
  assert block['feed-forward'] == 2 * (6 + 1) * (2 * TOKENS * 32 * 64)
  assert block['experts'] == 2 * 4 * (2 * 2 * SLOTS * 32 * 64)
  scanned = flops.train_step(dataclasses.replace(TINY, remat='block', scan_layers=True))
  assert scanned['feed-forward'] == block['feed-forward'] + 2 * (2 * TOKENS * 32 * 64)  # the dense one is not the last


def test_a_dense_model_has_no_gate():
  dense = flops.train_step(dataclasses.replace(TINY, num_experts=0))
  assert dense['gating'] == 0 and dense['feed-forward'] == 3 * 4 * (2 * 2 * TOKENS * 32 * 64)


def test_a_decoder_with_gated_layers_and_shared_key_value_heads():
  grok = registry.get('lm.shakespeare.Tiny')(num_experts=0, activation='geglu', num_groups=1)
  tokens = 8 * 16  # M=32, H=64, 8 query heads and 4 key/value heads of 4, 2 layers
  found = flops.train_step(grok)
  assert found['projections'] == 2 * 3 * 2 * tokens * (2 * 32 * 32 + 2 * 32 * 16)
  assert found['attention'] == 2 * 3 * (2 * 2 * tokens * 16 * 32)
  assert found['feed-forward'] == 2 * 3 * 2 * tokens * 3 * 32 * 64
  assert found['softmax'] == 3 * 2 * tokens * 32 * 260


def test_two_lstms_and_a_layer_between_them():
  dense = registry.get('lm.moe_lstm.Tiny')(num_experts=0)
  tokens = 8 * 16  # M=32, H=64
  found = flops.train_step(dense)
  assert found['other'] == 2 * 3 * 2 * tokens * 2 * 4 * 32 * 32
  assert found['feed-forward'] == 3 * 2 * tokens * 2 * 32 * 64
  assert found['softmax'] == 3 * 2 * tokens * 32 * 260 and not found['attention']


def test_a_token_meets_the_second_gates_of_its_groups_alone():
  config = dataclasses.replace(TINY, gate='hierarchical', groups_of_experts=4)
  # A first gate over 4 groups and, in 2 of them, a second over 4 experts; each with as many weights for noise.
  assert flops.train_step(config)['gating'] == 2 * 3 * (2 * TOKENS * 32 * 2 * (4 + 2 * 4))


def test_one_layer_with_experts():
  assert flops.moe_layer(TINY, 'einsum') == NOTHING | {
    'attention': 0,
    'softmax': 0,
    'gating': 3 * (2 * TOKENS * 32 * 16),
    'projections': 0,
    'feed-forward': 0,
    'experts': 3 * (2 * 2 * SLOTS * 32 * 64),
    'dispatch/combine': 5 * (2 * TOKENS * (16 * 4) * 32),
  }


def test_the_first_layer_with_experts_may_be_the_decoders():
  assert flops.first_moe(TINY) == TINY.model().encoder.layers['layer_01'].ffn
  in_decoder = dataclasses.replace(TINY, experts_in='decoder')
  assert flops.first_moe(in_decoder) == in_decoder.model().decoder.layers['layer_01'].ffn
  assert flops.moe_layer(in_decoder, 'gather')['experts'] == 3 * (2 * 2 * SLOTS * 32 * 64)


def test_every_token_visits_every_expert_of_a_soft_mixture():
  soft = dataclasses.replace(TINY, gate='soft')
  assert flops.moe_layer(soft, 'gather')['experts'] == 3 * 2 * 2 * TOKENS * 16 * 32 * 64


def test_decoding_step_by_step():
  rows, width = 3, 4
  found = flops.decode(TINY, rows)
  sources = rows * 16
  encoder = 2 * (4 * 2 * sources * 32 * 32 + 2 * 2 * sources * 16 * 32)
  memory = 2 * 2 * (2 * sources * 32 * 32)
  steps = 0
  for step in range(16):
    to_itself = 4 * 2 * 32 * 32 + 2 * 2 * (step + 1) * width * 32
    to_memory = 2 * 2 * 32 * 32 + 2 * 2 * 16 * 32
    steps += 2 * rows * width * (to_itself + to_memory)
  assert found['attention'] + found['projections'] == encoder + memory + steps
  assert found['projections'] == 2 * 4 * 2 * sources * 32 * 32 + memory + 2 * 6 * 2 * rows * width * 16 * 32 * 32
  # A dense layer and one of which a token visits two experts, of either stack.
  once = 2 * 2 * 32 * 64 * (sources + rows * width * 16)
  assert found['feed-forward'] == once and found['experts'] == 2 * once
  assert found['gating'] == 2 * 32 * 16 * (sources + rows * width * 16)
  assert found['softmax'] == 2 * 32 * 400 * rows * width * 16
