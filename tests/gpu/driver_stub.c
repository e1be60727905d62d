/* libcuda.so.1, as far as torch asks for it by name. */
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = 1; return 0; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = ""; return 0; }
