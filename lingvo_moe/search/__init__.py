"""Search for the symbols of a text: flat beam search (GShard, appendix A.1) and sampling, and what steers them.

searches       beam_search.py, flat_sequence.py, sampling.py
without        beam.py, the steps of a beam; length_norm.py; constraints.py, automaton.py and text_constraints.py;
TensorFlow     repetition.py; request.py and continuations.py, what is asked; minimum_bayes_risk.py
"""
