"""Operations with an implementation per backend: `ops.linear(...)` calls the one of the backend in force.

`reference.py`, `softmax_attention.py` and `output_softmax.py` define them; `backend.py` sets a backend; `cpu/`,
`xla.py`, `gpu.py`, `cudnn.py` and `litert.py` are backends. Imports core and xla_sharding; layers, optimizers, searches
and tasks import it.
"""

from lingvo_moe.ops import output_softmax, reference, softmax_attention
from lingvo_moe.ops.backend import operation
from lingvo_moe.ops.reference import Places as Places
from lingvo_moe.ops.reference import QueuePositions as QueuePositions
from lingvo_moe.ops.softmax_attention import attention_product as attention_product
from lingvo_moe.ops.softmax_attention import head_letters as head_letters
from lingvo_moe.ops.softmax_attention import masked_scores as masked_scores

lookup = operation(reference.lookup)
rounded = operation(reference.rounded)
linear = operation(reference.linear)
relu = operation(reference.relu)
product = operation(reference.product)
beside_experts = operation(reference.beside_experts)
to_experts = operation(reference.to_experts)
from_experts = operation(reference.from_experts)
heads_first = operation(softmax_attention.heads_first)
attention = operation(softmax_attention.attention)
layer_norm = operation(reference.layer_norm)
lstm = operation(reference.lstm)
lstm_cell = operation(reference.lstm_cell)
softmax_cross_entropy = operation(reference.softmax_cross_entropy)
output_loss = operation(output_softmax.output_loss)
queue_positions = operation(reference.queue_positions)
slots_per_round = operation(reference.slots_per_round)
dispatch_rows = operation(reference.dispatch_rows)
combine_rows = operation(reference.combine_rows)
grouped_ffn = operation(reference.grouped_ffn)
write_cache = operation(reference.write_cache)
loop_bound = operation(reference.loop_bound)
add_gradients = operation(reference.add_gradients)
mean_square = operation(reference.mean_square)
map_rows = operation(reference.map_rows)
