"""The CUDA path of renders, followed without a GPU."""
