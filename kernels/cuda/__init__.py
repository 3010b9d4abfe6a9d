"""CUDA sources of the GPU kernels, compiled by NVRTC."""
