"""Sources of the Triton kernels: read by the compiler only, never by planning or launching."""
