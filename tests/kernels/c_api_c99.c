/* Goal: a C99 program can include c_api.h, link the shared library and use it.
   Method: built as strict C99 with -pedantic-errors; one call with a known
   answer: two equal keys, so every row is tied. */

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bellwether/kernels/c_api.h"

int main(void) {
  float one[2] = {1, 1};
  float out[BW_PROBE_STAT_COUNT];
  bw_probe_params p;
  memset(&p, 0, sizeof(p));
  memset(out, 0, sizeof(out));
  out[BW_PROBE_LOGIT_MAX] = -HUGE_VALF;
  p.struct_size = (uint32_t)sizeof(p);
  p.backend = BW_CPU;
  p.dtype = BW_F32;
  p.batch = p.heads = p.kv_heads = p.head_dim = 1;
  p.q_len = p.k_len = 2;
  p.q.data = p.k.data = one;
  p.q.token_stride = p.k.token_stride = 1;
  p.scale = 1;
  p.stat_stride = 1;
  p.out = out;
  if (bw_probe(&p) != BW_KERNEL_OK) {
    printf("bw_probe: %s\n", bw_kernels_last_error());
    return 1;
  }
  if (out[BW_PROBE_TIED_ROWS_EPS] != 2 || out[BW_PROBE_LOGIT_MAX] != 1) {
    printf("tied %g of %g rows, logit_max %g\n", (double)out[BW_PROBE_TIED_ROWS_EPS], (double)out[BW_PROBE_ROWS],
           (double)out[BW_PROBE_LOGIT_MAX]);
    return 1;
  }
  return 0;
}
