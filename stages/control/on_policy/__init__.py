"""On-policy learning on Gymnasium's tasks: proximal policy optimisation."""
