"""One thread: the tests' tensors are small, and other work on the machine must not slow them down."""

import torch

torch.set_num_threads(1)
