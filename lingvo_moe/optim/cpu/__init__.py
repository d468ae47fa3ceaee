"""Weight updates on CPUs: in place, compiled by XLA, from gradients kept as two factors. Used by the local runtime."""
