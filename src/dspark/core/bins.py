"""How predictions are grouped, wherever they are held against what came true."""

BINS = 20
"""Equal-width bins of [0, 1], as in the paper's figure 6 and DeepSpec's evaluator."""
