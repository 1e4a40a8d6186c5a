"""Products in LNS between float32 tensors, for the layers and modules of scope ``matmul``."""
