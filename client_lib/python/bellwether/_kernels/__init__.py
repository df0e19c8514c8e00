"""The kernels library on torch tensors, and the memory that sums are added to."""
