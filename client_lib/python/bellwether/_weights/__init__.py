"""W_Q and W_K of each head: where they are, and the matrices that the model computes with."""
