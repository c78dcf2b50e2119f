"""The network in plain PyTorch: config, weights, layers, dense reference pass and hook points."""
