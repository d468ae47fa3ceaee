"""Search over a decoder: flat beam search (GShard, appendix A.1).

Imports core and layers; tasks import it.
"""
