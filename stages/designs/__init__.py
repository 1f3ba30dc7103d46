"""Search over agent designs: workflow, memory, planning and decoding around a trained model, chosen by measured success."""
