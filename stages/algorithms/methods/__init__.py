"""One module per published method, named as in `rl.algorithm`."""
