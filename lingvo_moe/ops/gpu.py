"""GPU backend: TensorFlow's own kernels and the hand-written gradients. Not run on hardware."""

from __future__ import annotations

from lingvo_moe.ops import recurrence, vjp
from lingvo_moe.ops.backend import Backend

# Dispatch into slots: rows grouped by expert would need a device-to-host sync, for the number of rows of each expert.
BACKEND = Backend(
  'gpu',
  {
    'combine_rows': vjp.combine_rows,
    'dispatch_rows': vjp.dispatch_rows,
    'layer_norm': vjp.layer_norm,
    'lstm': recurrence.lstm,
    'product': vjp.product,
    'softmax_cross_entropy': vjp.softmax_cross_entropy,
  },
  dispatcher='gather',
)
