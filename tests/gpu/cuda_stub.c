/* A CUDA runtime with one device that computes nothing: enough for torch to run on fake CUDA tensors without a driver.
 *
 * Preloaded before the real runtime. FakeTensorMode never launches a kernel or reads device memory; what is left is the
 * bookkeeping around it: which device is there, streams, events, and a little memory. */
#include <stdlib.h>
#include <string.h>

typedef int cudaError_t;
typedef void *cudaStream_t, *cudaEvent_t;
enum { cudaSuccess = 0 };

/* The beginning of the runtime's structure; torch reads no more of it, and clears the rest. */
struct cudaDeviceProp {
  char name[256], uuid[16], luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
#if CUDA_MAJOR < 13
  int clockRate;
#endif
  size_t totalConstMem;
  int major, minor;
  size_t textureAlignment, texturePitchAlignment;
#if CUDA_MAJOR < 13
  int deviceOverlap;
#endif
  int multiProcessorCount;
};

static const size_t MEMORY = (size_t)80 << 30;

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { (void)device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDA_MAJOR * 1000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDA_MAJOR * 1000; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }

#if CUDA_MAJOR < 13 /* its header gives the function this name */
#define cudaGetDeviceProperties cudaGetDeviceProperties_v2
#endif
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  (void)device;
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "a GPU that is not there");
  properties->totalGlobalMem = MEMORY;
  properties->major = 8; /* as an A100, which has bf16 */
  properties->multiProcessorCount = 108;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)attribute, (void)device;
  *value = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { (void)device, (void)peer; *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return cudaSuccess; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  (void)flags, (void)priority;
  *stream = (cudaStream_t)malloc(1);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { (void)stream; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { (void)stream; return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  (void)stream, (void)event, (void)flags;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status) {
  (void)stream;
  *status = 0 /* none */;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id) { /* and more, not set when none */
  if (id) *id = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, int *status, unsigned long long *id) {
  return cudaStreamGetCaptureInfo(stream, status, id);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  (void)flags;
  *event = (cudaEvent_t)malloc(1);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { (void)event, (void)stream; return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { (void)event; return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { (void)event; return cudaSuccess; }

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = MEMORY; return cudaSuccess; }
cudaError_t cudaMalloc(void **pointer, size_t size) { *pointer = malloc(size); return cudaSuccess; }
cudaError_t cudaFree(void *pointer) { free(pointer); return cudaSuccess; }
