// What a step does beside the forward.
#include "common.cuh"

// ids [n]: where sources [n] is not negative, the id that the step before has drawn for that row of its logits
__global__ void take_tokens(int* ids, const int* sources, const int* drawn, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  pdl_trigger();
  pdl_wait();
  if (i >= n) return;
  int row = (int)load4(sources + i);
  if (row >= 0) ids[i] = (int)load4(drawn + row);
}
