"""A virtual GPU: runs the PTX of compiled kernels on the CPU, with every access checked and counted."""
