"""Beam search over a decoder, on a flat key/value cache (GShard, appendix A.1).

Imports core and layers; tasks import it.
"""
