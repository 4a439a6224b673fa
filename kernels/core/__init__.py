"""What kernels of every architecture are composed of: sequence bounds, masks, softmax, tile order, barriers."""
