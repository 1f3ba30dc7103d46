"""Search over agent designs: what surrounds a trained model (workflow, memory, planning, decoding), chosen by measured
success."""
